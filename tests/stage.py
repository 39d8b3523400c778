"""A folder in a mount and a plain one, in which the same script runs, each call watched by another process.

The mounts here are calm (they note when they are asked to, and hold back for long), so that counts are exact.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import ALL_JOURNALS
from mounting import Mount
from scenarios import Observer, Watched

from deltapool.fs import control

CALM = "[limits]\nnote_seconds = 600\nhold_back_seconds = 600\n"
RULES = {"default rules": "", "everything a journal": ALL_JOURNALS}

Script = Callable[[Any, str], object]


@dataclasses.dataclass(frozen=True)
class Counts:
    """What `status` says has been done, to journals unless it says otherwise."""

    written: int
    changed: int
    folded: int
    work_written: int
    pwritten: int  # to live files of any class

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def status(mounted: Mount) -> dict[str, Any]:
    answer: dict[str, Any] = control.call(mounted.state, "status", 60)
    return answer


def flush(mounted: Mount) -> None:
    """Everything is noted and settled."""
    assert control.call(mounted.state, "flush", 60)["dirty"] == 0


def counts(mounted: Mount) -> Counts:
    found = status(mounted)
    journals = found["journals"]
    return Counts(
        journals["bytes_written"],
        journals["bytes_changed"],
        journals["rewrites_folded"],
        found["work"]["bytes_written"],
        found["live"]["bytes_pwritten"],
    )


class Stage:
    """A folder in a mount and a plain one beside it, with the same file in both."""

    def __init__(self, mounted: Mount, name: str, plain: pathlib.Path, observer: Observer) -> None:
        self.mounted = mounted
        self.name = name
        self.folder = mounted.path / plain.name
        self.plain = plain
        self.observer = observer
        self.folder.mkdir()
        self.path = str(self.folder / name)
        self.is_journal = name.endswith(".jsonl") or mounted.config == CALM + ALL_JOURNALS

    def same(self, script: Script) -> Counts:
        """Runs the script in both folders. What another process sees after each call is the same in both. What it took
        in the mount, once everything is noted."""
        flush(self.mounted)
        before = counts(self.mounted)
        traces = []
        for folder in (self.plain, self.folder):
            watched = Watched(folder, self.observer)
            script(watched, str(folder / self.name))
            self.observer.let_go()
            traces.append(watched.trace)
        for number, (expected, found) in enumerate(zip(*traces, strict=True)):
            assert found == expected, f"call {number}"
        flush(self.mounted)
        return counts(self.mounted) - before

    def content(self) -> bytes:
        return pathlib.Path(self.path).read_bytes()

    def journal(self, written: int, changed: int, folded: int = 0) -> Counts:
        """The counts of a script that changes that much of a journal; another file counts as work, and whole."""
        if self.is_journal:
            return Counts(written, changed, folded, 0, changed)
        return Counts(0, 0, 0, written, written)


@pytest.fixture(scope="module")
def observer() -> Iterator[Observer]:
    made = Observer()
    yield made
    made.close()


@pytest.fixture(scope="module", params=RULES)
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    base = tmp_path_factory.mktemp("calm")
    with Mount(base / "mount", base / "state", CALM + RULES[request.param]) as mounted:
        yield mounted


@pytest.fixture(params=["x.jsonl", "x.txt"])
def stage(
    request: pytest.FixtureRequest, calm: Mount, observer: Observer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    said = len(calm.log())
    yield Stage(calm, request.param, tmp_path_factory.mktemp("plain"), observer)
    assert "Traceback" not in calm.log()[said:]
