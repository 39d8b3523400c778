"""What agents do to their journals, as scripts of system calls, and a second process that watches them.

Each script takes `call`, which is `os` or behaves like it, so that the same script runs unwatched in a process of its
own (`start`), or with another process looking after every call (`Watched`). S1 to S8 are those of real agents.
"""

import dataclasses
import errno
import fcntl
import json
import mmap
import os
import pathlib
import pickle
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from os import (
    O_APPEND,
    O_CREAT,
    O_DIRECTORY,
    O_EXCL,
    O_NOFOLLOW,
    O_RDONLY,
    O_RDWR,
    O_TRUNC,
    O_WRONLY,
    SEEK_END,
    SEEK_SET,
)
from typing import Any

BUFFER_BYTES = 8192
FILE_BYTES_MAX = 1 << 26


def messages(count: int, size: int = 200, seed: int = 0) -> list[bytes]:
    """Lines as agents write them: a large header, then records that begin alike."""
    chance = random.Random(seed)
    made = [b'{"header": "%s"}\n' % chance.randbytes(size).hex().encode()]
    for number in range(1, count):
        text = chance.randbytes(chance.randrange(size // 4, size // 2 + 1)).hex().encode()
        made.append(b'{"role": "user", "n": %d, "content": "%s"}\n' % (number, text))
    return made[:count]


def rewrite(call: Any, path: str, lines: Sequence[bytes]) -> None:
    """One message of S1: the whole file through O_TRUNC, in chunks of lines."""
    fd = call.open(path, O_WRONLY | O_CREAT | O_TRUNC, 0o666)
    buffer = b""
    for line in lines:
        buffer += line
        if len(buffer) > BUFFER_BYTES:
            call.write(fd, buffer)
            buffer = b""
    if buffer:
        call.write(fd, buffer)
    call.close(fd)


def s1_rewrites(call: Any, path: str, lines: Sequence[bytes]) -> None:
    for count in range(1, len(lines) + 1):
        rewrite(call, path, lines[:count])


def s2_checked_append(call: Any, path: str, line: bytes) -> None:
    known = call.stat(path).st_size
    fd = call.open(path, O_RDONLY)
    call.lseek(fd, -1, SEEK_END)
    assert call.read(fd, 1) == b"\n"
    call.close(fd)
    append(call, path, line)
    assert call.stat(path).st_size == known + len(line)
    fd = call.open(path, O_RDONLY)
    call.fsync(fd)
    call.close(fd)


def append(call: Any, path: str, data: bytes) -> None:
    fd = call.open(path, O_WRONLY | O_CREAT | O_APPEND, 0o666)
    call.write(fd, data)
    call.close(fd)


def s3_replace(call: Any, path: str, data: bytes, temporary: str = "tmpa1b2c3d4") -> None:
    folder = os.path.dirname(path)
    new = f"{folder}/{temporary}"
    fd = call.open(new, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600)
    call.write(fd, data)
    call.fchmod(fd, 0o644)
    call.fsync(fd)
    call.close(fd)
    call.rename(new, path)
    directory = call.open(folder, O_RDONLY | O_DIRECTORY)
    call.fsync(directory)
    call.close(directory)


def s4_batches(call: Any, path: str, batches: Sequence[bytes]) -> None:
    for batch in batches:
        fd = call.open(path, O_WRONLY | O_CREAT | O_APPEND, 0o600)
        call.write(fd, batch)
        call.close(fd)
    fd = call.open(path, O_RDONLY)
    size = call.fstat(fd).st_size
    call.pread(fd, 65536, max(0, size - 65536))
    call.close(fd)
    try:
        call.open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, 0o600)
    except FileExistsError:
        pass
    else:
        raise AssertionError("an existing file was created")
    call.utime(path)


def s5_held_open(call: Any, path: str, lines: Sequence[bytes]) -> None:
    writer = call.open(path, O_RDWR | O_CREAT | O_APPEND, 0o666)
    call.utime(writer)
    offset = 0
    for line in lines:
        call.write(writer, line)
        reader = call.open(path, O_RDONLY)
        assert call.lseek(reader, 0, SEEK_END) == offset + len(line)
        call.lseek(reader, offset, SEEK_SET)
        assert call.read(reader, 1 << 20) == line
        call.close(reader)
        offset += len(line)
    call.close(writer)


def s6_head_trim(call: Any, path: str, line: bytes, keep: int) -> None:
    fd = call.open(path, O_RDWR | O_CREAT | O_APPEND, 0o600)
    inode = call.fstat(fd).st_ino
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    call.write(fd, line)
    reader = call.dup(fd)
    call.lseek(reader, -keep, SEEK_END)
    tail = call.read(reader, keep)
    call.ftruncate(fd, 0)
    call.write(fd, tail)
    call.close(reader)
    call.close(fd)
    found = call.stat(path)
    assert (found.st_ino, found.st_size) == (inode, keep)


def s7_tail_surgery(call: Any, path: str, start: int, end: int) -> None:
    fd = call.open(path, O_RDWR)
    size = call.fstat(fd).st_size
    rest = call.pread(fd, size - end, end)
    call.ftruncate(fd, start)
    call.pwrite(fd, rest, start)
    call.close(fd)


def s8_overwrite(call: Any, path: str, data: bytes) -> None:
    call.mkdir(path + ".lock")
    call.utime(path + ".lock")
    fd = call.open(path, O_WRONLY | O_CREAT, 0o666)
    call.write(fd, data)
    call.ftruncate(fd, len(data))
    call.close(fd)
    call.rmdir(path + ".lock")


def s8_index(call: Any, path: str, rounds: int, turn: int) -> None:
    """One of two processes that take turns at a counter in a shared mapping, under a lock on one byte."""
    fd = call.open(path, O_RDWR | O_CREAT, 0o644)
    for page in range(1, 9):
        call.pwrite(fd, b"\0", 4096 * page - 1)
    with mmap.mmap(fd, 32768) as shared:
        seen = 0
        while seen < rounds:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, 120)
            seen = int.from_bytes(shared[:8], "big")
            if seen < rounds and seen % 2 == turn:
                shared[:8] = (seen + 1).to_bytes(8, "big")
                shared[4096 + seen] = turn + 1
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, 120)
            time.sleep(0.001)  # sleeps: it is the other process's turn
    call.close(fd)


def edit_mapped(path: str, offset: int, data: bytes) -> None:
    """An edit in place through a shared mapping."""
    fd = os.open(path, O_RDWR)
    with mmap.mmap(fd, 0) as mapped:
        mapped[offset : offset + len(data)] = data
        mapped.flush()
    os.close(fd)


def follow(call: Any, path: str, size: int) -> bytes:
    """Reads a growing file by offset from another process's point of view, until it has `size` bytes."""
    deadline = time.monotonic() + 60
    found = b""
    while len(found) < size:
        assert time.monotonic() < deadline, f"{len(found)} of {size} bytes"
        fd = call.open(path, O_RDONLY)
        end = call.lseek(fd, 0, SEEK_END)
        assert end >= len(found)
        new = call.pread(fd, end - len(found), len(found))
        assert len(new) == end - len(found), "the size was ahead of the bytes"
        call.close(fd)
        found += new
        time.sleep(0.002)  # sleeps: the writer is another process
    return found


# Scripts in processes of their own.


def batches(writer: int, count: int) -> list[bytes]:
    """1 to 5 lines each, some of 40 kB; every line says whose it is and which."""
    chance = random.Random(writer)
    made, number = [], 0
    for _ in range(count):
        batch = b""
        for _ in range(chance.randrange(1, 6)):
            size = 20_000 if chance.random() < 0.1 else chance.randrange(10, 300)
            batch += b'{"writer": %d, "n": %d, "text": "%s"}\n' % (
                writer,
                number,
                chance.randbytes(size).hex().encode(),
            )
            number += 1
        made.append(batch)
    return made


def _followed(path: str, count: int) -> None:
    expected = b"".join(messages(count))
    assert follow(os, path, len(expected)) == expected


def _mess(folder: str, seed: int, count: int) -> None:
    from mess import mess  # it is made of the scripts above

    mess(folder, seed, count)


PROCESSES: dict[str, Callable[..., None]] = {
    "s1": lambda path, count, seed: s1_rewrites(os, path, messages(count, seed=seed)),
    "s4": lambda path, writer, count: s4_batches(os, path, batches(writer, count)),
    "s5": lambda path, count: s5_held_open(os, path, messages(count)),
    "follow": _followed,
    "mess": _mess,
    "s8": lambda path, rounds, turn: s8_index(os, path, rounds, turn),
}


# Imported, not run, so that what is sent to and fro has the same name in both processes.
_FOLDER = str(pathlib.Path(__file__).parent)
PROGRAM = [sys.executable, "-c", f"import sys; sys.path.insert(0, {_FOLDER!r}); import scenarios; scenarios.main()"]


def start(script: str, *arguments: str | int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PROGRAM, script, json.dumps(arguments)], stderr=subprocess.PIPE)


def join(*processes: subprocess.Popen[bytes]) -> None:
    """All have ended well."""
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    for said, code in ended:
        assert code == 0, said.decode()


# Watching.


@dataclasses.dataclass(frozen=True)
class Seen:
    """A file or folder as another process sees it, by name or through a descriptor that it has had open for long."""

    mode: int
    nlink: int
    size: int
    content: bytes | str | None


@dataclasses.dataclass(frozen=True)
class View:
    names: dict[str, Seen]
    held: dict[str, Seen]
    exact: dict[int, set[tuple[int, int]]]  # inode -> the (size, mtime) seen by any way


class Observer:
    """Another process that looks at a folder when told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([*PROGRAM, "observe", "[]"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def look(self, folder: pathlib.Path) -> View:
        return self._ask(str(folder))

    def let_go(self) -> None:
        """Closes what it has open."""
        self._ask("")

    def _ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, BaseException):
            raise AssertionError(f"the observer: {answer!r}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _observe() -> None:
    held: dict[str, int] = {}
    while True:
        try:
            folder = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: object
        try:
            if folder:
                answer = _look(folder, held)
            else:
                while held:
                    os.close(held.popitem()[1])
                answer = None
        except OSError as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _look(folder: str, held: dict[str, int]) -> View:
    names: dict[str, Seen] = {}
    exact: dict[int, set[tuple[int, int]]] = {}

    def seen(found: os.stat_result, content: bytes | str | None) -> Seen:
        if stat.S_ISREG(found.st_mode):
            exact.setdefault(found.st_ino, set()).add((found.st_size, found.st_mtime_ns))
        size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        return Seen(found.st_mode, found.st_nlink, size, content)

    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        found = os.lstat(path)
        content: bytes | str | None = None
        if stat.S_ISREG(found.st_mode):
            fd = os.open(path, O_RDONLY)
            seen(os.fstat(fd), None)
            content = os.pread(fd, FILE_BYTES_MAX, 0)
            held.setdefault(path, os.dup(fd)) if path not in held else None
            os.close(fd)
        elif stat.S_ISLNK(found.st_mode):
            content = os.readlink(path)
        names[name] = seen(found, content)
    kept = {
        os.path.basename(path): seen(os.fstat(fd), os.pread(fd, FILE_BYTES_MAX, 0))
        for path, fd in held.items()
        if path.startswith(f"{folder}/")
    }
    return View(names, kept, exact)


class Watched:
    """`os`, but after every call the observer looks at the folder. `trace` is what was called and what was seen.

    Whatever shows a file shows the size and the mtime that the caller's own descriptor has."""

    def __init__(self, folder: pathlib.Path, observer: Observer) -> None:
        self.folder = folder
        self.observer = observer
        self.trace: list[tuple[str, object, dict[str, Seen], dict[str, Seen]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except OSError as error:
                self._note(name, errno.errorcode[error.errno or 0])
                raise
            if name in ("write", "pwrite", "ftruncate"):
                own = os.fstat(arguments[0])
                view = self._note(name, result)
                seen = view.exact.get(own.st_ino, {(own.st_size, own.st_mtime_ns)})
                assert seen == {(own.st_size, own.st_mtime_ns)}, f"after {name}: {seen}"
            else:
                self._note(name, None if name in ("open", "dup", "stat", "fstat", "lstat") else result)
            return result

        return call

    def _note(self, name: str, result: object) -> View:
        view = self.observer.look(self.folder)
        self.trace.append((name, result, view.names, view.held))
        return view


def main() -> None:
    if sys.argv[1] == "observe":
        _observe()
    else:
        PROCESSES[sys.argv[1]](*json.loads(sys.argv[2]))
