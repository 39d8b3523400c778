"""What Linux programs expect of a filesystem: content. Sparse files, appends, mappings, programs, locks, fsync.

Most is tried on a file of class work and on a journal; where ext4 gives the answer, on a plain folder too.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys

import pytest
from mounting import Mount, run, wait_until
from processes import Child, Flag, errno_of, together

from deltapool.fs import control

both_classes = pytest.mark.parametrize("suffix", ["", ".jsonl"], ids=["work", "journal"])
MIB, TIB = 1 << 20, 1 << 40
libc = ctypes.CDLL(None, use_errno=True)


@both_classes
def test_a_file_may_be_a_tebibyte_of_nothing(shared: Mount, folder: pathlib.Path, suffix: str) -> None:
    path, size = folder / f"sparse{suffix}", TIB

    def check() -> None:
        found = path.stat()
        assert found.st_size == size
        assert found.st_blocks * 512 < MIB
        with open(path, "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 100, 0) == b"begin" + bytes(95)
            assert os.pread(file.fileno(), 100, size // 2) == bytes(100)
            assert os.pread(file.fileno(), 100, size - 10) == b"\0\0\0\0\0\0\0end"

    with open(path, "wb", buffering=0) as file:
        file.write(b"begin")
        os.pwrite(file.fileno(), b"end", size - 3)
    check()
    control.call(shared.state, "flush", 60)
    check()
    shared.crash()
    check()
    with open(path, "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), 5)
        assert file.read() == b"begin"
        os.ftruncate(file.fileno(), size)
        assert os.pread(file.fileno(), 5, size - 5) == bytes(5)
    path.unlink()


@both_classes
def test_appends_above_one_request_never_interleave(folder: pathlib.Path, suffix: str) -> None:
    """A request carries 1 MiB at most."""
    path, lengths = folder / f"log{suffix}", [3 * MIB + 1, 100, MIB + 17, 4096, 2 * MIB]

    def work(letter: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for length in lengths:
            assert os.write(fd, letter * (length - 1) + b"\n") == length
        os.close(fd)

    letters = [b"a", b"b", b"c", b"d"]
    together(*(lambda letter=letter: work(letter) for letter in letters))
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(len(set(line)) == 2 for line in lines)
    for letter in letters:
        assert [len(line) for line in lines if line.startswith(letter)] == lengths


@both_classes
def test_another_descriptor_sees_everything_at_once(folder: pathlib.Path, suffix: str) -> None:
    """Size, bytes and times, as soon as the write has returned, for another process too."""
    path, asked, given = folder / f"f{suffix}", os.pipe(), os.pipe()

    def look() -> None:
        with open(path, "rb", buffering=0) as file:
            while os.read(asked[0], 1) == b"?":
                found, by_path = os.fstat(file.fileno()), path.stat()
                data = os.pread(file.fileno(), 1 << 20, 0)
                assert found == by_path
                os.write(given[1], struct.pack("qqq", found.st_size, found.st_mtime_ns, hash_of(data)))

    path.write_bytes(b"")
    with Child(look) as child, open(path, "r+b", buffering=0) as writer:
        content = b""
        for number in range(30):
            if number == 20:
                content = content[:1000]
                os.ftruncate(writer.fileno(), 1000)
            line = b"%d" % number * 700
            content += line
            os.pwrite(writer.fileno(), line, len(content) - len(line))
            os.write(asked[1], b"?")
            expected = (len(content), os.fstat(writer.fileno()).st_mtime_ns, hash_of(content))
            assert struct.unpack("qqq", os.read(given[0], 24)) == expected
        os.write(asked[1], b".")
        child.wait()
    for fd in (*asked, *given):
        os.close(fd)


def hash_of(data: bytes) -> int:
    return sum(byte * (index % 251 + 1) for index, byte in enumerate(data))


@both_classes
def test_a_private_mapping_changes_nothing(folder: pathlib.Path, suffix: str) -> None:
    path = folder / f"f{suffix}"
    path.write_bytes(b"line\n" * 3000)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as memory:
        memory[5000:5004] = b"####"
        os.pwrite(file.fileno(), b"other", 10)
        assert memory[10:15] == b"other"
        assert path.read_bytes() == b"line\n" * 2 + b"other" + b"line\n" * 2997


@both_classes
def test_a_mapping_outlives_its_name_and_descriptor(folder: pathlib.Path, suffix: str) -> None:
    path = folder / f"f{suffix}"
    path.write_bytes(b"line\n" * 3000)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    path.unlink()
    memory[5000:5004] = b"####"
    memory.flush()
    assert memory[:] == b"line\n" * 1000 + b"####\n" + b"line\n" * 1999
    memory.close()


@both_classes
def test_a_shared_mapping_joins_two_processes(folder: pathlib.Path, suffix: str) -> None:
    """The index of SQLite's write-ahead log: grown by bytes, mapped by both, agreed on through a lock."""
    path, set_by_peer = folder / f"x-shm{suffix}", Flag()
    with open(path, "w+b") as file:
        for page in range(1, 9):
            os.pwrite(file.fileno(), b"\0", 4096 * page - 1)

    def peer() -> None:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 32768) as memory:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 120)
            memory[100:105] = b"hello"
            fcntl.lockf(file, fcntl.LOCK_UN, 1, 120)
            set_by_peer.set()
            wait_until(lambda: memory[20_000:20_005] == b"again", "the answer through the mapping")

    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 32768) as memory, Child(peer) as child:
        wait_until(lambda: set_by_peer, "the peer")
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 120)
        assert memory[100:105] == b"hello"
        fcntl.lockf(file, fcntl.LOCK_UN, 1, 120)
        memory[20_000:20_005] = b"again"
        child.wait()


def test_programs_run_from_the_mount(folder: pathlib.Path) -> None:
    script = folder / "script"
    script.write_text("#!/bin/sh\necho run by $0 with $1\n")
    assert errno_of(lambda: subprocess.run([script], check=False)) == errno.EACCES
    script.chmod(0o755)
    assert run([script, "words"]) == f"run by {script} with words\n"
    program = folder / "sleep"
    shutil.copy(shutil.which("sleep") or "", program)
    running = subprocess.Popen([program, "60"])
    try:
        wait_until(lambda: os.readlink(f"/proc/{running.pid}/exe") == str(program), "the start of the program")
        assert errno_of(lambda: os.open(program, os.O_WRONLY)) == errno.ETXTBSY
        assert errno_of(lambda: os.truncate(program, 0)) == errno.ETXTBSY
        program.unlink()
        shutil.copy(shutil.which("true") or "", program)
        assert running.poll() is None
        run([program])
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    with open(folder / "open", "wb") as file:
        os.fchmod(file.fileno(), 0o755)
        file.write(b"#!/bin/sh\n")
        file.flush()
        assert errno_of(lambda: os.execv(folder / "open", ["open"])) == errno.ETXTBSY


def test_a_library_is_loaded_from_the_mount(folder: pathlib.Path) -> None:
    """A mapping that may be executed, by another process."""
    library = run([sys.executable, "-c", "import _ctypes; print(_ctypes.__file__)"]).strip()
    shutil.copy(library, folder / "_ctypes.so")
    code = f"import ctypes; print(bool(ctypes.CDLL({os.fspath(folder / '_ctypes.so')!r})))"
    assert run([sys.executable, "-c", code]).strip() == "True"


# --- locks


def lock(fd: int, kind: str) -> None:
    """Takes an exclusive lock, without waiting."""
    if kind == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    command = fcntl.F_SETLK if kind == "fcntl" else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 100, 10, 0))


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_lock_keeps_others_out_and_dies_with_its_process(folder: pathlib.Path, kind: str, end: str) -> None:
    path, locked, release = folder / ".jsonl.lock", Flag(), Flag()
    path.touch()

    def hold() -> None:
        fd = os.open(path, os.O_RDWR)
        lock(fd, kind)
        locked.set()
        wait_until(lambda: release, "the release")
        os.close(fd)

    with Child(hold) as holder, open(path, "r+b") as file:
        wait_until(lambda: locked, "the lock")
        assert errno_of(lambda: lock(file.fileno(), kind)) in (errno.EAGAIN, errno.EACCES)
        if end == "killed":
            holder.kill()
        else:
            release.set()
            holder.wait()
        lock(file.fileno(), kind)


def test_locks_of_ranges_meet_only_where_they_overlap(folder: pathlib.Path) -> None:
    path, locked = folder / "x.db", Flag()
    path.write_bytes(bytes(1000))

    def hold() -> None:
        fd = os.open(path, os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 100, 0)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 200)
        locked.set()
        signal.pause()

    with Child(hold) as holder, open(path, "r+b") as file:
        wait_until(lambda: locked, "the locks")
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 0)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 100)
        assert errno_of(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99)) in (errno.EAGAIN, errno.EACCES)
        assert errno_of(lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 299)) in (
            errno.EAGAIN,
            errno.EACCES,
        )
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 250, 1, 0)
        kind, _, start, length, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        assert (kind, start, length, pid) == (fcntl.F_WRLCK, 200, 100, holder.pid)
        ino = os.fstat(file.fileno()).st_ino
        assert re.search(rf"POSIX .* {holder.pid} \S+:{ino} 200 299", pathlib.Path("/proc/locks").read_text())


# --- fsync


@both_classes
def test_fsync_works_through_any_descriptor(folder: pathlib.Path, suffix: str) -> None:
    """Also a read-only one, fdatasync, and on folders: afterwards bytes and names are durable, and said to be."""
    path = folder / f"f{suffix}"

    def durable(each: pathlib.Path) -> bool:
        return os.getxattr(each, "user.deltapool.durable") == b"yes"

    for flags, sync in ((os.O_RDONLY, os.fsync), (os.O_WRONLY, os.fdatasync), (os.O_RDWR, os.fsync)):
        with open(path, "ab") as file:
            file.write(b"line\n")
        assert not durable(path)
        fd = os.open(path, flags)
        sync(fd)
        assert durable(path)
        os.close(fd)
    new = folder / "new"
    new.mkdir()
    (new / "link").symlink_to("x")
    fd = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    assert durable(new)
    os.fdatasync(fd)
    os.close(fd)
    fd = os.open(folder, os.O_RDONLY)
    os.rename(path, new / "moved")
    os.fsync(fd)
    assert durable(folder)
    os.close(fd)
    run(["sync", "-f", folder])


@both_classes
def test_every_way_to_move_bytes_moves_the_same(folder: pathlib.Path, tmp_path: pathlib.Path, suffix: str) -> None:
    def play(place: pathlib.Path) -> tuple[list[int], bytes]:
        path, target = place / f"f{suffix}", place / f"t{suffix}"
        with open(path, "w+b", buffering=0) as file, open(target, "w+b", buffering=0) as copy:
            source, fd = file.fileno(), copy.fileno()
            results = [
                os.writev(source, [b"one ", b"two ", b"three " * 2000]),
                os.pwritev(source, [b"patch", b"ed"], 9000),
                os.pwrite(source, b"far", 20_000),
                os.sendfile(fd, source, 100, 8000),
                os.copy_file_range(source, fd, 3000, 50, 100),
                os.lseek(source, 0, os.SEEK_END),
                os.lseek(source, -3, os.SEEK_END),
                len(os.pread(source, 50_000, 19_000)),
                os.preadv(source, [first := bytearray(10), second := bytearray(20)], 8995),
            ]
            os.truncate(path, 15_000)
            os.truncate(path, 16_001)
            results += [path.stat().st_size, len(os.pread(source, 5000, 14_000)), os.pread(source, 1, 15_500)[0]]
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        return results, path.read_bytes() + target.read_bytes() + bytes(first) + bytes(second)

    assert play(folder) == play(tmp_path)
