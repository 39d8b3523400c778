"""Field case 9: several agents at work on one mount, and what is left of it, also after a killed daemon.

Four loops: commits, package trees moved into place, a journal, a database. Each counts what it has finished. The run
ends when every loop has done its share; with --full, after ten minutes.
"""

import contextlib
import json
import os
import pathlib
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from mounting import Mount, deltapool, run, wait_until
from processes import Child, Counter, Flag, running

FULL_SECONDS = 600
PACKAGE_FILES = 12
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0"]


def commits(place: pathlib.Path, stop: Flag, done: Counter) -> None:
    run([*GIT, "init", "-q", place])
    while not stop:
        number = done.value
        for name in range(3):
            (place / f"file{name}.py").write_text(f"{number} {name}\n" * 200)
        subprocess.run([*GIT, "add", "-A"], cwd=place, check=True, capture_output=True)
        subprocess.run([*GIT, "commit", "-qm", str(number)], cwd=place, check=True, capture_output=True)
        done.add()


def trees(place: pathlib.Path, stop: Flag, done: Counter) -> None:
    """As npm does: a tree is written aside, the old one moved away, the new one moved in."""
    modules = place / "node_modules"
    modules.mkdir(parents=True)
    while not stop:
        version = done.value
        package, staging = modules / f"package{version % 4}", place / ".staging"
        staging.mkdir()
        (staging / "lib").mkdir()
        for number in range(PACKAGE_FILES):
            (staging / "lib" / f"{number}.js").write_text(f"version {version} " * 300)
        if package.exists():
            os.rename(package, place / ".old")
            run(["rm", "-rf", place / ".old"])
        os.rename(staging, package)
        done.add()


def lines(place: pathlib.Path, stop: Flag, done: Counter) -> None:
    place.mkdir()
    fd = os.open(place / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while not stop:
        line = line_of(done.value)
        assert os.write(fd, line) == len(line)
        done.add()


def line_of(number: int) -> bytes:
    return json.dumps({"number": number, "fill": "x" * (number * 37 % 9000)}).encode() + b"\n"


def rows(place: pathlib.Path, stop: Flag, done: Counter) -> None:
    place.mkdir()
    connection = sqlite3.connect(place / "x.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE t(number INTEGER PRIMARY KEY, fill)")
    while not stop:
        connection.execute("INSERT INTO t VALUES (?, ?)", (done.value, "x" * 2000))
        done.add()


LOOPS: list[Callable[[pathlib.Path, Flag, Counter], None]] = [commits, trees, lines, rows]
SHARES = [4, 4, 300, 50]


@contextlib.contextmanager
def at_work(folder: pathlib.Path, stop: Flag, counters: list[Counter], full: bool) -> Iterator[list[Child]]:
    """The loops, when each has done its share."""
    started = time.monotonic()

    def enough() -> bool:
        if full and time.monotonic() < started + FULL_SECONDS:
            return False
        return all(counter.value >= share for counter, share in zip(counters, SHARES, strict=True))

    works = [
        lambda loop=loop, counter=counter: loop(folder / loop.__name__, stop, counter)
        for loop, counter in zip(LOOPS, counters, strict=True)
    ]
    with running(*works) as children:
        wait_until(enough, "every loop's share", FULL_SECONDS + 120)
        yield children


def check(folder: pathlib.Path, counted: list[int]) -> None:
    """Whatever the four had finished is there, and whole. The last commit may have died with its name."""
    run(["git", "fsck", "--full", "--strict"], cwd=folder / "commits")
    assert int(run(["git", "rev-list", "--count", "HEAD"], cwd=folder / "commits")) >= counted[0] - 1
    packages = list((folder / "trees" / "node_modules").iterdir())
    assert packages
    for package in packages:
        versions = {path.read_text().split()[1] for path in (package / "lib").iterdir()}
        assert len(versions) == 1
        assert len(list((package / "lib").iterdir())) == PACKAGE_FILES
    content = (folder / "lines" / "events.jsonl").read_bytes()
    expected = b"".join(map(line_of, range(counted[2])))
    assert content.startswith(expected)
    assert line_of(counted[2]).startswith(content[len(expected) :])
    with contextlib.closing(sqlite3.connect(folder / "rows" / "x.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        ((count, last),) = connection.execute("SELECT count(*), max(number) FROM t").fetchall()
        assert count == last + 1 >= counted[3]


@pytest.mark.timeout(FULL_SECONDS + 600)
def test_case_09_several_agents_leave_everything_whole(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    stop, counters = Flag(), [Counter() for _ in LOOPS]
    with at_work(folder, stop, counters, full) as children:
        stop.set()
        for child in children:
            child.wait()
    check(folder, [counter.value for counter in counters])
    shared.remount()
    check(folder, [counter.value for counter in counters])


@pytest.mark.timeout(FULL_SECONDS + 600)
def test_case_09_a_killed_daemon_leaves_everything_whole(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    stop, counters = Flag(), [Counter() for _ in LOOPS]
    with at_work(folder, stop, counters, full) as children:
        shared.kill()
        for child in children:
            child.reap()  # each failed in its own way
    counted = [counter.value for counter in counters]
    shared.start()
    check(folder, counted)
    assert deltapool("fsck", shared.path, check=False).returncode == 0
