"""Fixtures and options shared by all tests."""

import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from mounting import Mount

from deltapool.fs import cli

pytest_plugins = ["stage"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash-rounds",
        type=int,
        default=3,
        help="how often the daemon is killed, or the power cut, in each crash test",
    )
    parser.addoption("--model-rounds", type=int, default=5, help="how many random runs the model test makes")
    parser.addoption("--seed", type=int, default=1, help="the seed of crash and model tests")
    parser.addoption("--full", action="store_true", help="the field cases in the size that was reported: hours")


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """A mounted volume with the default rules."""
    with Mount(tmp_path / "mount", tmp_path / "state") as mounted:
        yield mounted


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """One mount for all tests of a module that need no more than a folder in one."""
    base = tmp_path_factory.mktemp("shared")
    with Mount(base / "mount", base / "state") as mounted:
        yield mounted


@pytest.fixture
def folder(shared: Mount, request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """A folder of its own in the shared mount. A handler that fails unexpectedly fails the test."""
    said = len(shared.log())
    path = shared.path / re.sub(r"\W+", "-", request.node.name)
    path.mkdir()
    yield path
    assert "Traceback" not in shared.log()[said:]


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the field cases run in the size that was reported."""
    return bool(request.config.getoption("--full"))


class Said(NamedTuple):
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs the command line in this process, through its entry point, with the given words."""

    def run(*words: str | os.PathLike[str]) -> Said:
        monkeypatch.setattr("sys.argv", ["deltapool", *(os.fspath(word) for word in words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        return Said(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def refused(command: Callable[..., Said]) -> Callable[..., str]:
    """Runs a command that must fail: a message on stderr, nothing on stdout, exit code 1."""

    def run(*words: str | os.PathLike[str]) -> str:
        said = command(*words)
        assert (said.code, said.out) == (1, "")
        assert said.err.startswith("deltapool: ")
        return said.err

    return run


ALL_JOURNALS = '[[rule]]\nmatch = "*"\nclass = "journal"\n'


@pytest.fixture
def journal_mount(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """A mounted volume in which every file is a journal."""
    with Mount(tmp_path / "mount", tmp_path / "state", ALL_JOURNALS) as mounted:
        yield mounted
