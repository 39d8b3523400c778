"""The deltas of real mounts: whatever agents did, a reader that knows nothing but the deltas has the bytes of every
journal, each step proved by its digest."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest
import scenarios
from conftest import ALL_JOURNALS
from recording import RecordingMount, Replica
from scenarios import messages

RULES = {"default rules": "", "everything a journal": ALL_JOURNALS}
QUICK = "[limits]\nnote_seconds = 0.05\nhold_back_seconds = 0.2\njournal_idle_seconds = 0.2\nsettle_seconds = 0.1\n"
CALM = "[limits]\nnote_seconds = 600\nhold_back_seconds = 600\n"


@contextlib.contextmanager
def recorded(folder: pathlib.Path, config: str) -> Iterator[RecordingMount]:
    with RecordingMount(folder / "mount", folder / "state", config) as mounted:
        yield mounted
        assert "Traceback" not in (folder / "recording.log").read_text()


def check(mounted: RecordingMount) -> Replica:
    """The reader of the deltas has every journal that is there now."""
    mounted.flush()
    replica = mounted.replica()
    journals = 0
    for path in mounted.path.rglob("*"):
        if path.is_file() and os.getxattr(path, "user.deltapool.class") == b"journal":
            journals += 1
            assert replica.bytes_of(path.stat().st_ino) == path.read_bytes(), path
    assert journals
    return replica


@pytest.fixture(params=RULES)
def quick(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[RecordingMount]:
    """It notes all the time."""
    with recorded(tmp_path, QUICK + RULES[request.param]) as mounted:
        yield mounted


@pytest.fixture
def calm(tmp_path: pathlib.Path) -> Iterator[RecordingMount]:
    """It notes when it is told to."""
    with recorded(tmp_path, CALM) as mounted:
        yield mounted


def test_a_rewritten_journal_ships_what_was_added(calm: RecordingMount) -> None:
    lines, path = messages(60), str(calm.path / "x.jsonl")
    for count in range(1, 61):
        scenarios.rewrite(os, path, lines[:count])
        if count % 20 == 0:
            calm.flush()
    replica = check(calm)
    assert replica.bytes_carried == len(b"".join(lines))
    assert [delta.mtime_ns for delta in replica.deltas] == sorted(delta.mtime_ns for delta in replica.deltas)
    assert replica.deltas[-1].mtime_ns == os.stat(path).st_mtime_ns
    born = replica.deltas[0].born
    assert born is not None
    assert (born.path, born.mode) == (b"x.jsonl", 0o100644)


@pytest.mark.parametrize("temporary", ["tmp", "tmp.jsonl"])
def test_a_replaced_journal_ships_what_was_added(calm: RecordingMount, temporary: str) -> None:
    lines, path = messages(60), str(calm.path / "x.jsonl")
    scenarios.append(os, path, b"".join(lines[:50]))
    calm.flush()
    scenarios.append(os, path, lines[50])  # not noted: it is shipped with the file that replaces this one
    for count in (55, 60):
        scenarios.s3_replace(os, path, b"".join(lines[:count]), temporary)
    replica = check(calm)
    assert replica.bytes_carried == len(b"".join(lines))
    born = replica.deltas[-1].born
    assert born is not None
    assert born.prefix_length == len(b"".join(lines[:50]))


def test_a_journal_that_stops_being_one_is_born_again(calm: RecordingMount) -> None:
    path, other = calm.path / "x.jsonl", calm.path / "x.txt"
    path.write_bytes(b"one\n")
    calm.flush()
    path.rename(other)
    other.write_bytes(b"two\n")
    calm.flush()
    other.rename(path)
    replica = check(calm)
    assert [delta.born is not None for delta in replica.deltas] == [True, True]


def test_a_linked_file_in_the_middle_of_a_rewrite_is_a_journal_with_its_new_bytes(calm: RecordingMount) -> None:
    """A rewritten work file has two generations of bytes; those of the journal are the new ones."""
    path = calm.path / "x.txt"
    path.write_bytes(b"old\n")
    calm.flush()
    with path.open("wb", buffering=0) as file:
        file.write(b"new and longer\n")
        os.link(path, calm.path / "x.jsonl")
        check(calm)
        file.write(b"still open\n")
    check(calm)
    calm.remount()
    assert path.read_bytes() == b"new and longer\nstill open\n"


def test_all_scenarios(quick: RecordingMount) -> None:
    folder, lines = quick.path, messages(40)
    running = [scenarios.start("s4", str(folder / "s4.jsonl"), writer, 40) for writer in (1, 2)]
    running += [scenarios.start("s5", str(folder / "s5.jsonl"), 200)]
    running += [scenarios.start("s8", str(folder / "s8.jsonl"), 20, turn) for turn in (0, 1)]
    scenarios.s1_rewrites(os, str(folder / "s1.jsonl"), lines)
    path = str(folder / "x.jsonl")
    scenarios.append(os, path, lines[0])
    for number, line in enumerate(lines[1:], 1):
        scenarios.s2_checked_append(os, path, line)
        scenarios.s3_replace(os, path, b"".join(lines[:number]), f"tmp{number % 2}")
        scenarios.s6_head_trim(os, path, line, min(500, os.stat(path).st_size))
        scenarios.s7_tail_surgery(os, path, 10, 30)
        scenarios.s8_overwrite(os, path, b"".join(lines[: 40 - number]))
        scenarios.edit_mapped(path, 10, b"mapped")
    scenarios.join(*running)
    check(quick)


@pytest.mark.parametrize("processes", [1, 4])
def test_a_mess(quick: RecordingMount, processes: int, pytestconfig: pytest.Config) -> None:
    seed = 1000 * pytestconfig.getoption("--seed")
    running = [scenarios.start("mess", str(quick.path), seed + number, 150) for number in range(processes)]
    scenarios.join(*running)
    check(quick)
    quick.remount()
    scenarios.join(scenarios.start("mess", str(quick.path), seed + 77, 50))
    check(quick)


@pytest.mark.crash
def test_a_mess_with_a_crash(quick: RecordingMount, pytestconfig: pytest.Config) -> None:
    """What was dirty when the daemon was killed is born again."""
    seed = 1000 * pytestconfig.getoption("--seed")
    for round_ in range(2):
        scenarios.join(*(scenarios.start("mess", str(quick.path), seed + 10 * round_ + n, 60) for n in range(2)))
        quick.crash()
    scenarios.join(scenarios.start("mess", str(quick.path), seed + 99, 30))
    check(quick)
