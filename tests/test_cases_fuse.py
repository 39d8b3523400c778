"""The field cases about what FUSE filesystems get wrong (10 to 19): real reports, each tried on the mount.

The number in a test's name is that of the case. Most run twice, on a file of class work and on a journal, and on a
plain folder too where the right answer is "as on ext4". Sizes are scaled down unless --full is given.
"""

import contextlib
import errno
import mmap
import os
import pathlib
import random
import sqlite3
import stat
import time
from collections.abc import Callable
from typing import Any

import pytest
from mounting import Mount, run, wait_until
from processes import Flag, errno_of, running, together

from deltapool.fs import control

both_classes = pytest.mark.parametrize("suffix", ["", ".jsonl"], ids=["work", "journal"])
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
PAST_NS = 1_577_836_800_123_456_789  # 2020-01-01


@both_classes
def test_case_10_appends_land_at_the_end(folder: pathlib.Path, tmp_path: pathlib.Path, suffix: str) -> None:
    def play(place: pathlib.Path) -> tuple[bytes, ...]:
        path = place / f"f{suffix}"
        run(["sh", "-c", 'echo a > "$0"; echo b >> "$0"; cat "$0"', path])
        first = path.read_bytes()
        fd, reader = os.open(path, os.O_WRONLY | os.O_APPEND), os.open(path, os.O_RDONLY)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"c" * 5001)
        second = os.pread(reader, 10_000, 0)
        os.pwrite(fd, b"d" * 37, 2)  # Linux appends all the same
        os.lseek(fd, 1, os.SEEK_SET)
        os.write(fd, b"e")
        third = os.pread(reader, 10_000, 0)
        position = os.lseek(fd, 0, os.SEEK_CUR)
        os.close(fd)
        os.close(reader)
        return first, second, third, b"%d" % position

    assert play(folder) == play(tmp_path)


@both_classes
def test_case_11_a_shorter_rewrite_keeps_no_old_tail(folder: pathlib.Path, suffix: str) -> None:
    path, other = folder / f"f{suffix}", folder / f"other{suffix}"
    path.write_bytes(b"x" * 21)
    run(["sh", "-c", "printf 'BB\\n' > \"$0\"", path])
    assert (path.stat().st_size, path.read_bytes()) == (3, b"BB\n")
    path.write_bytes(b"y" * 9000)
    with open(path, "rb", buffering=0) as old:
        assert old.read(10) == b"y" * 10
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        assert (os.fstat(old.fileno()).st_size, old.read()) == (0, b"")
        path.write_bytes(b"z" * 12)
        assert old.read() == b"zz"
    path.write_bytes(b"y" * 9000)
    os.link(path, other)
    other.write_bytes(b"CC\n")
    assert (path.stat().st_size, path.read_bytes()) == (3, b"CC\n")


@both_classes
def test_case_12_the_new_name_works_at_once_after_a_rename(folder: pathlib.Path, suffix: str) -> None:
    temporary, path = folder / "tmp1234", folder / f"f{suffix}"
    for content in (b"first\n", b"second\n", b"second\nthird\n"):
        temporary.write_bytes(content)
        run(["mv", temporary, path])
        assert path.stat().st_size == len(content)
        assert run(["cat", path]).encode() == content
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert memory[:] == content
        assert errno_of(temporary.stat) == errno.ENOENT


@both_classes
def test_case_12_a_file_below_a_renamed_folder_stays_open(folder: pathlib.Path, suffix: str) -> None:
    old, new = folder / "old", folder / "new"
    (old / "sub").mkdir(parents=True)
    with open(old / "sub" / f"f{suffix}", "wb", buffering=0) as file:
        file.write(b"one ")
        os.rename(old, new)
        file.write(b"two ")
        path = new / "sub" / f"f{suffix}"
        with open(path, "ab", buffering=0) as again:
            again.write(b"three ")
        file.seek(0, os.SEEK_END)
        file.write(b"four")
        assert os.fstat(file.fileno()).st_ino == path.stat().st_ino
    assert path.read_bytes() == b"one two three four"
    assert errno_of((old / "sub").stat) == errno.ENOENT


def use_without_name(fd: int) -> None:
    """Everything that a descriptor of a file without a name still has to do."""
    assert os.fstat(fd).st_nlink == 0
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"written after its name was gone")
    assert os.pread(fd, 100, 0) == b"written after its name was gone"
    os.fchmod(fd, 0o640)
    os.utime(fd, ns=(1, PAST_NS))
    found = os.fstat(fd)
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, PAST_NS)
    os.fsync(fd)
    os.ftruncate(fd, 7)
    assert os.pread(fd, 100, 0) == b"written"
    assert os.fstat(fd).st_size == 7


@both_classes
def test_case_13_the_descriptor_of_a_replaced_file_goes_on(folder: pathlib.Path, suffix: str) -> None:
    path, new = folder / f"a{suffix}", folder / f"b{suffix}"
    path.write_bytes(b"old content")
    new.write_bytes(b"new content")
    fd = os.open(path, os.O_RDWR)
    os.rename(new, path)
    use_without_name(fd)
    os.close(fd)
    assert path.read_bytes() == b"new content"
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    use_without_name(fd)
    os.close(fd)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_case_13_the_descriptor_of_a_removed_folder_goes_on(folder: pathlib.Path, how: str) -> None:
    path, other = folder / "a", folder / "b"
    path.mkdir()
    other.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    if how == "removed":
        path.rmdir()
    else:
        os.rename(other, path)
    assert os.fstat(fd).st_nlink == 0
    os.fchmod(fd, 0o700)
    os.utime(fd, ns=(1, PAST_NS))
    found = os.fstat(fd)
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o700, PAST_NS)
    os.fsync(fd)
    assert os.listdir(fd) == []
    assert errno_of(lambda: os.mkdir("x", dir_fd=fd)) == errno.ENOENT
    assert errno_of(lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)) == errno.ENOENT
    os.close(fd)


@both_classes
def test_case_14_what_is_written_after_a_rename_is_there(folder: pathlib.Path, suffix: str) -> None:
    with open(folder / f"1{suffix}", "wb", buffering=0) as file:
        file.write(b"before ")
        os.rename(folder / f"1{suffix}", folder / f"2{suffix}")
        file.write(b"after")
    assert (folder / f"2{suffix}").read_bytes() == b"before after"
    with open(folder / f"2{suffix}", "ab", buffering=0) as file:
        os.rename(folder / f"2{suffix}", folder / "3")  # another class now, for a journal
        file.write(b" and later")
    assert (folder / "3").read_bytes() == b"before after and later"


@pytest.mark.timeout(3600)
@both_classes
def test_case_15_a_reader_never_misses_a_file_that_is_replaced(folder: pathlib.Path, full: bool, suffix: str) -> None:
    path, stop = folder / f"x{suffix}", Flag()
    path.write_bytes(b"0")

    def read() -> int:
        opened = 0
        while not stop:
            with open(path, "rb") as file:  # ENOENT fails the child, and the test
                assert file.read() != b""
            opened += 1
        return opened

    with running(read, read, read, read) as readers:
        for number in range(20_000 if full else 200):
            fresh = folder / f"fresh{number % 2}"
            fresh.write_bytes(b"%d" % number)
            os.rename(fresh, path)
        stop.set()
        assert all(reader.wait() > 0 for reader in readers)


def test_case_16_a_given_mtime_stays(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    before_close = [folder / "before", folder / "before.jsonl"]
    after_close = [folder / "after", folder / "after.jsonl"]
    for path in before_close:
        with open(path, "wb", buffering=0) as file:
            file.write(b"dirty data")
            os.utime(file.fileno(), ns=(PAST_NS, PAST_NS))
    for path in after_close:
        path.write_bytes(b"data")
    run(["touch", "-d", "@1577836800.123456789", *after_close])

    def times() -> set[tuple[int, int]]:
        return {(path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in before_close + after_close}

    given = {(PAST_NS, PAST_NS)}
    assert times() == given
    if full:
        end = time.monotonic() + 10
        wait_until(lambda: times() != given or time.monotonic() > end, "ten seconds")
    control.call(shared.state, "flush", 60)  # the delayed work, all of it, now
    assert times() == given
    shared.remount()
    assert times() == given
    shared.crash()
    assert times() == given


@pytest.mark.timeout(3600)
def test_case_17_directories_of_30000_names_are_listed_whole(folder: pathlib.Path, full: bool) -> None:
    """30,000 names with --full, 3,000 otherwise: a request carries about 30 of them."""
    count, chance, path = 30_000 if full else 3000, random.Random(17), folder / "many"
    path.mkdir()
    names = {f"{number:x}." + "n" * chance.randrange(0, 256 - 6) for number in range(count)}
    assert max(map(len, names)) > 250
    for name in names:
        os.mknod(path / name, 0o644)
    run(["sync", "-f", folder])

    listed = run(["ls", "-f", path]).splitlines()
    assert sorted(listed) == sorted({*names, ".", ".."})
    found = run(["find", path, "-mindepth", "1", "-printf", "%f\\0"]).split("\0")[:-1]
    assert sorted(found) == sorted(names)
    with os.scandir(path) as entries:
        assert sorted(entry.name for entry in entries) == sorted(names)

    met = []
    with os.scandir(path) as entries:
        for entry in entries:
            met.append(entry.name)
            if len(met) % 2:
                os.unlink(entry)
    assert sorted(met) == sorted(names)
    assert sorted(os.listdir(path)) == sorted(set(names) - set(met[::2]))
    run(["rm", "-rf", path])
    assert errno_of(path.stat) == errno.ENOENT


EXPECTED = {0} | {
    getattr(errno, name)
    for name in "ENOENT EEXIST ENOTDIR EISDIR ENOTEMPTY ENODATA EINVAL EPERM ELOOP ENXIO EPIPE EAGAIN".split()
}


def vanishing(folder: pathlib.Path, chance: random.Random) -> list[Callable[[], Any]]:
    """What programs may do to a few names that others remove all the time."""

    def name() -> pathlib.Path:
        return folder / chance.choice(["a", "b", "c.jsonl", "d", "d/e", "d/f.jsonl"])

    def opened(flags: int) -> None:
        fd = os.open(name(), flags | os.O_NONBLOCK, 0o644)
        try:
            os.fstat(fd)
            os.fchmod(fd, 0o700)
            os.utime(fd)
            if flags != os.O_RDONLY:
                os.write(fd, b"some bytes\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def listed() -> None:
        with os.scandir(name()) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)

    return [
        lambda: opened(os.O_RDONLY),
        lambda: opened(os.O_WRONLY | os.O_CREAT),
        lambda: opened(os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        lambda: opened(os.O_WRONLY | os.O_APPEND),
        listed,
        lambda: os.stat(name()),
        lambda: os.readlink(name()),
        lambda: os.getxattr(name(), "user.x"),
        lambda: os.getxattr(name(), "user.deltapool.class"),
        lambda: os.setxattr(name(), "user.x", b"1"),
        lambda: os.removexattr(name(), "user.x"),
        lambda: os.listxattr(name()),
        lambda: os.truncate(name(), chance.randrange(20)),
        lambda: os.chmod(name(), 0o755),
        lambda: os.link(name(), name()),
        lambda: os.symlink("a", name()),
        lambda: os.mknod(name(), stat.S_IFIFO | 0o600),
        lambda: os.mkdir(name()),
        lambda: os.rename(name(), name()),
        lambda: os.unlink(name()),
        lambda: os.unlink(name()),
        lambda: os.rmdir(name()),
    ]


def test_case_18_names_that_vanish_never_end_the_mount(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    def work(seed: int) -> set[int]:
        chance = random.Random(seed)
        actions = vanishing(folder, chance)
        return {errno_of(chance.choice(actions)) for _ in range(20_000 if full else 400)}

    pid = shared.pid
    met = set().union(*together(*(lambda seed=seed: work(seed) for seed in range(6))))
    assert met <= EXPECTED, [os.strerror(number) for number in met - EXPECTED]
    assert {errno.ENOENT, errno.EEXIST, errno.ENODATA} <= met
    status = control.call(shared.state, "status", 60)
    assert status["fuse"]["handler_errors"] == 0
    assert status["pids"]["fs"] == pid


def test_case_19_a_shared_mapping_is_the_file(shared: Mount, folder: pathlib.Path) -> None:
    def play(path: pathlib.Path) -> bytearray:
        content = bytearray(b"line\n" * 4000)
        path.write_bytes(content)
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for at, data in ((0, b"LINE"), (4094, b"across"), (9000, b"end")):
                memory[at : at + len(data)] = content[at : at + len(data)] = data
            assert path.read_bytes() == content  # before it is written back too
            memory.flush()
            os.pwrite(file.fileno(), b"written", 5000)
            content[5000:5007] = b"written"
            assert memory[:] == content
            memory[12_000:12_003] = content[12_000:12_003] = b"???"
        return content

    expected = {path: play(path) for path in (folder / "f", folder / "f.jsonl")}
    shared.remount()
    assert {path: path.read_bytes() for path in expected} == expected


def test_case_19_a_mapped_journal_counts_what_changed(shared: Mount, folder: pathlib.Path) -> None:
    path = folder / "f.jsonl"
    path.write_bytes(b"line\n" * 4000)

    def counts() -> tuple[int, int]:
        (listed,) = [
            each for each in control.call(shared.state, "journals", 60)["journals"] if folder.name in each["path"]
        ]
        return listed["bytes"], listed["bytes_changed"]

    assert counts() == (20_000, 20_000)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[7000:7003] = b"???"
        memory.flush()
    assert counts() == (20_000, 20_003)


def test_case_19_sqlite_works_with_wal_and_a_mapped_database(folder: pathlib.Path) -> None:
    def insert(writer: int) -> None:
        connection = sqlite3.connect(folder / "x.db", timeout=60, isolation_level=None)
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        (mapped,) = connection.execute("PRAGMA mmap_size=67108864").fetchone()
        assert (mode, mapped) == ("wal", 67108864)
        connection.execute("CREATE TABLE IF NOT EXISTS t(writer, number, fill)")
        for number in range(40):
            connection.execute("INSERT INTO t VALUES (?, ?, ?)", (writer, number, "x" * 3000))
        connection.close()

    together(lambda: insert(1), lambda: insert(2))
    with contextlib.closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("PRAGMA mmap_size=67108864")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT writer, count(*), sum(number) FROM t GROUP BY 1").fetchall() == [
            (1, 40, 780),
            (2, 40, 780),
        ]
