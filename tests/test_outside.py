"""Somebody changes the state folder while nobody watches. It is found beside the next mount, kept, and reported.

The change comes after a clean unmount, so no dirty mark tells of it: only the comparison with what was noted does.
"""

import errno
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults import Fault, FaultyMount
from mounting import wait_until
from processes import errno_of

from deltapool.fs import control

WORK, JOURNAL = b"some work\n" * 1000, b'{"n": 1}\n' * 1000
LONG_AGO_NS = 1_000_000_000 * 10**9
CLEAN_FILES = 1000
STATUS_SECONDS = 60
DIRTY_FOR_LONG = "[limits]\nsettle_seconds = 600\njournal_idle_seconds = 600\n"


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[FaultyMount]:
    """A mount with a work file and a journal, and 20 files that nobody will touch. Clean and unmounted."""
    made = FaultyMount(tmp_path / "mount", tmp_path / "state")
    try:
        made.start()
        (made.path / "work").write_bytes(WORK)
        (made.path / "journal.jsonl").write_bytes(JOURNAL)
        for number in range(20):
            (made.path / f"untouched{number}").write_bytes(b"%d" % number * 100)
        yield made
    finally:
        made.clear()


def live_file(mount: FaultyMount, name: str) -> pathlib.Path:
    """Where the bytes are. Asked while it is mounted."""
    number = (mount.path / name).stat().st_ino
    return mount.state / "live" / f"{number % 256:02x}" / str(number)


def unmounted(mount: FaultyMount, name: str) -> pathlib.Path:
    """Unmounts cleanly. The live file of `name`."""
    live = live_file(mount, name)
    mount.stop()
    assert mount.fsck() == []
    return live


def audited(mount: FaultyMount) -> dict[str, Any]:
    """What the status says after the comparison."""
    wait_until(lambda: mount.status()["audit"]["done"], "the end of the audit")
    return mount.status()


def flip(path: pathlib.Path) -> None:
    """Other bytes, the same length, and the time put back: only ctime tells."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"<changed>")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shorten(path: pathlib.Path) -> None:
    os.truncate(path, 777)


def lengthen(path: pathlib.Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more\n" * 300)


def date_back(path: pathlib.Path) -> None:
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


@pytest.mark.parametrize("name", ["work", "journal.jsonl"])
@pytest.mark.parametrize("change", [flip, shorten, lengthen, date_back])
def test_a_live_file_changed_from_outside_is_found_kept_and_reported(
    mount: FaultyMount, name: str, change: Callable[[pathlib.Path], None]
) -> None:
    live = unmounted(mount, name)
    change(live)
    expected, mtime = live.read_bytes(), live.stat().st_mtime_ns
    said = [(each["kind"], each["path"]) for each in mount.fsck()]
    assert said == [("changed", name)]
    before = len(mount.log())
    mount.start()
    status = audited(mount)
    assert status["recovery"]["clean"] is True
    assert status["audit"]["changed_outside"] == 1
    assert str(live) in mount.log()[before:]
    path = mount.path / name
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (len(expected), mtime)
    assert path.read_bytes() == expected == live.read_bytes()
    sizes = [len(WORK), len(JOURNAL)]
    sizes[name == "journal.jsonl"] = len(expected)
    assert [status["work"]["bytes"] - _untouched_bytes(), status["journals"]["bytes"]] == sizes
    with open(path, "ab") as file:
        file.write(b"one more line\n")
    mount.remount()
    assert path.read_bytes() == expected + b"one more line\n"
    assert _lines(mount) == _real_lines(mount)
    assert audited(mount)["audit"]["changed_outside"] == 0, "it was noted anew"
    assert mount.fsck() == []


def _untouched_bytes() -> int:
    return sum(len(b"%d" % number * 100) for number in range(20))


def _lines(mount: FaultyMount) -> dict[str, int]:
    listed = control.call(mount.state, "journals", STATUS_SECONDS)["journals"]
    return {each["path"]: each["lines"] for each in listed}


def _real_lines(mount: FaultyMount) -> dict[str, int]:
    return {"journal.jsonl": (mount.path / "journal.jsonl").read_bytes().count(b"\n")}


def test_a_journal_changed_from_outside_may_be_written_before_the_audit_comes_to_it(mount: FaultyMount) -> None:
    live = unmounted(mount, "journal.jsonl")
    flip(live)
    expected = live.read_bytes() + b"appended\n"
    mount.faults = (Fault("deltapool.fs.recover:_differing", "wait", seconds=1.0),)
    mount.start()
    with open(mount.path / "journal.jsonl", "ab") as file:
        file.write(b"appended\n")
    assert not mount.status()["audit"]["done"]
    audited(mount)
    assert (mount.path / "journal.jsonl").read_bytes() == expected
    mount.stop()
    assert mount.fsck() == []
    mount.start()
    assert _lines(mount) == {"journal.jsonl": expected.count(b"\n")}
    assert (mount.path / "journal.jsonl").read_bytes() == expected


@pytest.mark.parametrize("name", ["work", "journal.jsonl"])
def test_a_file_whose_live_file_was_removed_gives_eio_and_fsck_reports_it(mount: FaultyMount, name: str) -> None:
    live = unmounted(mount, name)
    live.unlink()
    before = len(mount.log())
    mount.start()
    assert audited(mount)["audit"]["changed_outside"] == 1
    assert str(live) in mount.log()[before:]
    assert errno_of((mount.path / name).read_bytes) == errno.EIO
    assert [(each["kind"], each["path"]) for each in mount.fsck()] == [("missing", name)]
    assert name in os.listdir(mount.path), "the name is kept"
    assert (mount.path / "untouched7").read_bytes() == b"7" * 100
    mount.remount()
    assert [(each["kind"], each["path"]) for each in mount.fsck()] == [("missing", name)]
    (mount.path / name).unlink()
    assert mount.fsck() == []


def test_a_live_file_that_belongs_to_nothing_is_set_aside_and_named(mount: FaultyMount) -> None:
    live = live_file(mount, "untouched3")
    (mount.path / "untouched3").unlink()
    mount.stop()
    assert not live.exists()
    live.write_bytes(b"whose is this?")
    assert [each["kind"] for each in mount.fsck()] == ["orphan"]
    before = len(mount.log())
    mount.start()
    status = audited(mount)
    assert (status["audit"]["lost_and_found"], status["audit"]["changed_outside"]) == (1, 0)
    assert str(live) in mount.log()[before:]
    assert not live.exists()
    assert (mount.state / "lost" / live.name).read_bytes() == b"whose is this?"
    assert mount.fsck() == []


def test_what_is_as_it_was_left_is_not_reported(mount: FaultyMount) -> None:
    live = unmounted(mount, "work")
    live.read_bytes()
    before = len(mount.log())
    mount.start()
    assert audited(mount)["audit"] == {"done": True, "changed_outside": 0, "lost_and_found": 0}
    assert "WARNING" not in mount.log()[before:]


def test_recovery_looks_at_dirty_files_only_and_the_audit_at_the_others(tmp_path: pathlib.Path) -> None:
    mount = FaultyMount(tmp_path / "mount", tmp_path / "state", DIRTY_FOR_LONG)
    try:
        mount.start()
        for number in range(CLEAN_FILES):
            (mount.path / f"clean{number}").write_bytes(b"%d" % number)
        (mount.path / "journal.jsonl").write_bytes(JOURNAL)
        mount.remount()
        for name in ("clean10", "clean20", "journal.jsonl", "new"):
            with open(mount.path / name, "ab") as file:
                file.write(b"appended\n")
        names = os.open(mount.path, os.O_RDONLY)
        os.fsync(names)
        os.close(names)
        changed = live_file(mount, "clean500")
        mount.kill()
        changed.write_bytes(b"from outside")
        mount.start()
        status = audited(mount)
        assert status["recovery"]["clean"] is False
        assert status["recovery"]["dirty"] == 4
        assert status["audit"]["changed_outside"] == 1
        for number in range(CLEAN_FILES):
            added = b"appended\n" if number in (10, 20) else b""
            content = b"from outside" if number == 500 else b"%d" % number + added
            assert (mount.path / f"clean{number}").read_bytes() == content
        assert (mount.path / "journal.jsonl").read_bytes() == JOURNAL + b"appended\n"
        assert (mount.path / "new").read_bytes() == b"appended\n"
        assert mount.fsck() == []
    finally:
        mount.clear()


def test_what_the_audit_finds_on_a_full_disk_is_not_let_go_of(mount: FaultyMount, tmp_path: pathlib.Path) -> None:
    """A lost tail must be cut off, and there is no room to note that: nobody gets to see it meanwhile."""
    control.call(mount.state, "flush", STATUS_SECONDS)
    live, full = live_file(mount, "journal.jsonl"), tmp_path / "full"
    full.touch()
    mount.kill()
    live.write_bytes(JOURNAL + bytes(100))
    mount.faults = (Fault("os:posix_fallocate", "raise", armed_by=str(full), errno=errno.ENOSPC),)
    mount.start()
    assert errno_of(lambda: (mount.path / "journal.jsonl").stat()) == errno.ENOSPC
    assert (mount.path / "work").read_bytes() == WORK
    assert not mount.status()["audit"]["done"]
    full.unlink()
    assert audited(mount)["audit"]["changed_outside"] == 1
    assert (mount.path / "journal.jsonl").read_bytes() == JOURNAL
    mount.stop()
    assert mount.fsck() == []
