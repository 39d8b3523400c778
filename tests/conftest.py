"""Fixtures and options shared by all tests."""

import pathlib
from collections.abc import Iterator

import pytest
from mounting import Mount


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash-rounds",
        type=int,
        default=3,
        help="how often the daemon is killed, or the power cut, in each crash test",
    )
    parser.addoption("--model-rounds", type=int, default=5, help="how many random runs the model test makes")
    parser.addoption("--seed", type=int, default=1, help="the seed of crash and model tests")


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """A mounted volume with the default rules."""
    with Mount(tmp_path / "mount", tmp_path / "state") as mounted:
        yield mounted


ALL_JOURNALS = '[[rule]]\nmatch = "*"\nclass = "journal"\n'


@pytest.fixture
def journal_mount(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """A mounted volume in which every file is a journal."""
    with Mount(tmp_path / "mount", tmp_path / "state", ALL_JOURNALS) as mounted:
        yield mounted
