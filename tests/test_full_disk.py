"""The disk of the state folder is full: by us, or by another program, to the last block.

Writers are told ENOSPC, and nothing else fails: reads go on, what was acknowledged stays, removals work, and when space
returns so do writes. The state folder lies on a disk of its own of 100 MB (`loopdisk`).
"""

import errno
import hashlib
import os
import pathlib
import random
from collections.abc import Callable, Iterator

import pytest
from faults import FaultyMount
from loopdisk import LoopDisk, unavailable
from mounting import deltapool, wait_until
from processes import errno_of

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

MIB = 1 << 20
DISK_MEBIBYTES = 100
TOO_MUCH_MEBIBYTES = 300
FILE_MEBIBYTES = 8
LEFT_BYTES = 4096  # ext4 keeps a block or two to itself

# The namespace's log has less room of its own, and fills sooner.
SMALL_LOG = """[limits]
commit_operations = 8
wal_reserve_bytes = 1048576
wal_reserve_least_bytes = 262144
"""


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[LoopDisk]:
    with LoopDisk(tmp_path / "disk.image", tmp_path / "disk", DISK_MEBIBYTES) as made:
        yield made


@pytest.fixture
def mount(tmp_path: pathlib.Path, disk: LoopDisk) -> Iterator[FaultyMount]:
    mounted = FaultyMount(tmp_path / "mount", disk.path / "state")
    with mounted:
        yield mounted


class Written:
    """What was acknowledged: names and digests of contents."""

    def __init__(self, folder: pathlib.Path, seed: int = 1) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}
        self._chance = random.Random(seed)

    def write(self, name: str, size: int) -> int:
        """Writes a file until it has `size` bytes, or fails; the errno. All that was acknowledged counts."""
        digest, done, failed = hashlib.sha256(), 0, 0
        fd = -1
        try:
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            while done < size:
                piece = self._chance.randbytes(min(MIB // 4, size - done))
                count = os.write(fd, piece)
                digest.update(piece[:count])
                done += count
        except OSError as error:
            failed = error.errno or -1
        if fd >= 0:
            os.close(fd)
            self.digests[name] = digest.hexdigest()
        return failed

    def fill(self) -> int:
        """Writes files until one fails. The errno."""
        for number in range(TOO_MUCH_MEBIBYTES // FILE_MEBIBYTES):
            failed = self.write(f"file{number}", FILE_MEBIBYTES * MIB)
            if failed:
                return failed
        return 0

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()
        del self.digests[name]

    def check(self) -> None:
        """Everything is there, and nothing else."""
        assert self.found() == self.digests

    def found(self) -> dict[str, str]:
        files = sorted(self.folder.iterdir())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_case_37_a_full_disk_is_enospc_reads_go_on_and_writes_succeed_when_space_returns(
    mount: FaultyMount, disk: LoopDisk
) -> None:
    written = Written(mount.path)
    assert written.fill() == errno.ENOSPC
    assert len(written.digests) > 5
    for tries in range(3):
        assert written.write(f"one more {tries}", MIB) == errno.ENOSPC
    written.check()
    assert mount.status()["read_only"] is None
    free = disk.free_bytes
    for name in ("file0", "file2"):
        written.remove(name)
    wait_until(lambda: disk.free_bytes > free + (2 * FILE_MEBIBYTES - 1) * MIB, "the space of what was removed")
    assert written.write("after", FILE_MEBIBYTES * MIB) == 0
    written.check()
    mount.remount()
    written.check()
    assert mount.fsck() == []
    assert mount.status()["fuse"]["handler_errors"] == 0


def test_journals_may_use_the_reserve_and_keep_what_was_acknowledged(mount: FaultyMount) -> None:
    written = Written(mount.path)
    (mount.path / "journal.jsonl").touch()
    written.digests["journal.jsonl"] = ""
    assert written.fill() == errno.ENOSPC
    journal, acknowledged, failed = mount.path / "journal.jsonl", b"", 0
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND)
    line = b"j" * 9_999 + b"\n"
    while not failed and len(acknowledged) < 16 * MIB:
        try:
            acknowledged += line[: os.write(fd, line)]
        except OSError as error:
            failed = error.errno or -1
        if len(acknowledged) == MIB:
            os.fsync(fd)
    os.close(fd)
    assert failed == errno.ENOSPC
    assert len(acknowledged) >= MIB, "the reserve is 2 MB, of which the rest of the disk's own needs take some"
    assert journal.read_bytes() == acknowledged
    written.digests["journal.jsonl"] = hashlib.sha256(acknowledged).hexdigest()
    written.check()
    mount.remount()
    written.check()
    assert mount.status()["journals"]["bytes"] == len(acknowledged)
    assert mount.fsck() == []


def test_names_at_a_full_disk_change_wholly_or_say_enospc(mount: FaultyMount, disk: LoopDisk) -> None:
    """Until the namespace's log has no room either."""
    mount.stop()
    mount.config = SMALL_LOG
    mount.start()
    tree: dict[str, str] = {}
    for number in range(50):
        (mount.path / f"old{number}").write_text(f"content {number}")
        tree[f"old{number}"] = f"content {number}"
    filler = disk.fill()
    chance, refused = random.Random(1), 0
    long = "n" * 200
    for number in range(2500):
        refused += _change_a_name(mount.path, tree, chance, f"{long}{number}")
    assert refused > 0, "the disk was not full"
    assert _tree(mount.path) == tree
    assert mount.status()["read_only"] is None
    assert mount.status()["fuse"]["handler_errors"] == 0
    assert mount.fsck() == []
    filler.unlink()
    wait_until(lambda: errno_of((mount.path / "directory of the end").mkdir) != errno.ENOSPC, "room for a name")
    tree["directory of the end"] = "/"
    (mount.path / "old49").write_text("rewritten") if "old49" in tree else None
    tree |= {"old49": "rewritten"} if "old49" in tree else {}
    mount.remount()
    assert _tree(mount.path) == tree
    assert mount.fsck() == []


def _change_a_name(folder: pathlib.Path, tree: dict[str, str], chance: random.Random, new: str) -> bool:
    """One operation. True if it said ENOSPC; then nothing has changed."""
    some = chance.choice(sorted(tree)) if tree else ""
    what = chance.choice(["mkdir", "mkdir", "symlink", "rename", "create", "remove"])
    operation: Callable[[], object]
    match what if some else "mkdir":
        case "mkdir":
            operation, after = (folder / new).mkdir, tree | {new: "/"}
        case "symlink":
            operation, after = (lambda: (folder / new).symlink_to("target")), tree | {new: "->target"}
        case "create":
            operation, after = (folder / new).touch, tree | {new: ""}
        case "rename":
            operation = lambda: (folder / some).rename(folder / new)  # noqa: E731
            after = {new if name == some else name: content for name, content in tree.items()}
        case _:
            operation = (folder / some).rmdir if tree[some] == "/" else (folder / some).unlink
            after = {name: content for name, content in tree.items() if name != some}
    failed = errno_of(operation)
    assert failed in (0, errno.ENOSPC), f"{what}: errno {failed}"
    if not failed:
        tree.clear()
        tree.update(after)
    return failed != 0


def _tree(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in folder.iterdir():
        if path.is_symlink():
            found[path.name] = f"->{path.readlink()}"
        else:
            found[path.name] = "/" if path.is_dir() else path.read_text()
    return found


def test_another_program_fills_the_disk_to_the_last_block(mount: FaultyMount, disk: LoopDisk) -> None:
    written = Written(mount.path)
    for name, size in (("big", 10 * MIB), ("small", 100), ("journal.jsonl", 50_000), ("fsynced later", MIB)):
        assert written.write(name, size) == 0
    later = os.open(mount.path / "fsynced later", os.O_RDONLY)
    filler = disk.fill()
    assert disk.free_bytes < LEFT_BYTES
    os.fsync(later)
    os.close(later)
    assert written.write("more work", MIB) == errno.ENOSPC
    appended, journal = b"", os.open(mount.path / "journal.jsonl", os.O_WRONLY | os.O_APPEND)
    failed = 0
    while not failed and len(appended) < 4 * MIB:
        try:
            appended += b"line\n"[: os.write(journal, b"line\n")]
        except OSError as error:
            failed = error.errno or -1
    assert failed == errno.ENOSPC
    content = (mount.path / "journal.jsonl").read_bytes()
    assert content[50_000:] == appended
    written.digests["journal.jsonl"] = hashlib.sha256(content).hexdigest()
    written.check()
    written.remove("small")
    assert mount.status()["read_only"] is None
    filler.unlink()
    wait_until(lambda: errno_of(lambda: os.write(journal, b"again\n")) == 0, "room")
    os.fsync(journal)
    os.close(journal)
    written.digests["journal.jsonl"] = hashlib.sha256(content + b"again\n").hexdigest()
    assert errno_of(lambda: os.unlink(mount.path / "more work")) in (0, errno.ENOENT)
    written.digests.pop("more work", None)
    wait_until(lambda: disk.free_bytes > 20 * MIB, "room")
    wait_until(lambda: _fits(written, "more"), "room for work")
    written.check()
    mount.remount()
    written.check()
    assert mount.fsck() == []
    assert mount.status()["fuse"]["handler_errors"] == 0


def _fits(written: Written, name: str) -> bool:
    """What is free is asked again after a moment."""
    if written.write(name, MIB) == 0:
        return True
    if name in written.digests:
        written.remove(name)
    return False


def test_a_daemon_killed_at_a_full_disk_recovers_when_there_is_space(mount: FaultyMount, disk: LoopDisk) -> None:
    written = Written(mount.path)
    assert written.fill() == errno.ENOSPC
    for name in list(written.digests):  # makes the names durable
        fd = os.open(mount.path / name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    filler = disk.fill()
    mount.kill()
    assert disk.free_bytes < LEFT_BYTES
    filler.unlink()
    mount.start()
    assert mount.status()["recovery"]["clean"] is False
    written.check()
    wait_until(lambda: mount.status()["audit"]["done"], "the end of the audit")
    assert mount.fsck() == []
    written.remove("file0")
    wait_until(lambda: _fits(written, "after"), "room for work")
    mount.remount()
    written.check()


def test_a_mount_on_a_full_disk_says_so_and_exits_1(mount: FaultyMount, disk: LoopDisk) -> None:
    written = Written(mount.path)
    assert written.write("file", MIB) == 0
    mount.stop()
    filler = disk.fill()
    for folder in (mount.state, disk.path / "another state"):
        said = deltapool("mount", mount.path, "--state", folder, check=False)
        assert said.returncode == 1
        assert f"the disk of {folder} is full: " in said.stderr
    assert not os.path.ismount(mount.path)
    filler.unlink()
    mount.start()
    written.check()


@pytest.mark.parametrize("end", ["unmounted", "killed"])
def test_a_volume_that_has_filled_its_disk_is_mounted_again_so_that_files_can_be_removed(
    mount: FaultyMount, disk: LoopDisk, end: str
) -> None:
    written = Written(mount.path)
    assert written.fill() == errno.ENOSPC
    if end == "killed":
        os.sync()  # the names too
        disk.fill()  # what is left goes to another program
        mount.kill()
    else:
        mount.stop()
    deltapool("mount", mount.path, "--state", mount.state)
    try:
        written.check()
        written.remove("file0")
        written.remove("file1")
        if end == "unmounted":
            wait_until(lambda: _fits(written, "after"), "room for work")
        written.check()
    finally:
        deltapool("umount", mount.path)


def test_journals_are_noted_for_long_at_a_full_disk_without_a_failure(mount: FaultyMount, disk: LoopDisk) -> None:
    """What is noted of them needs room in the namespace's log, and there is no more to be had."""
    mount.stop()
    mount.config = "[limits]\nnote_seconds = 0.001\nwal_reserve_bytes = 65536\nwal_reserve_least_bytes = 32768\n"
    mount.start()
    journal = mount.path / "journal.jsonl"
    journal.write_bytes(b"0" * 4000)
    with open(journal, "rb+", buffering=0) as file:
        os.fsync(file.fileno())
        filler, begin = disk.fill(), _logged(mount)
        for number in range(5000):
            file.seek(0)
            file.write(b"%04d" % number)  # in place: the journal needs no room
            for _ in range(3):  # a note has time to be made
                assert mount.status()["read_only"] is None, f"after {_logged(mount) - begin} bytes"
            if number >= 199 and _logged(mount) - begin >= 32768:
                break  # the room that was reserved has been needed
        else:
            raise AssertionError(f"{_logged(mount) - begin} bytes were logged, far less than was reserved")
        os.fsync(file.fileno())
    assert mount.journals()[0]["bytes"] == 4000
    mount.stop()
    filler.unlink()
    mount.start()
    assert journal.read_bytes() == b"%04d" % number + b"0" * 3996
    assert mount.fsck() == []


def _logged(mount: FaultyMount) -> int:
    return int(mount.status()["namespace"]["bytes_logged"])
