"""Whole trees for tests: one with some of everything, what a program sees of a tree, what touches a state folder."""

import hashlib
import os
import pathlib
import random
import sqlite3
import stat
from typing import Any

AS_ROOT = os.geteuid() == 0

# What programs and filesystems stumble over.
NAMES = [
    b"plain",
    b"new\nline",
    b"\xff\xfe no utf-8",
    "fu\u0308r".encode(),
    "f\u00fcr".encode(),
    b"-dash",
    b"a b\tc",
    b"back\\slash",
    b"%2F%00",
    b"trailing. ",
    b"x" * 255,
    b"caf\xe9.jsonl",
]


def fill(root: pathlib.Path, chance: random.Random) -> None:
    """Makes in an empty directory, which stays where it is, some of everything, by every way that leads there."""
    here = os.fsencode(root)
    for number, name in enumerate(NAMES):
        put(os.path.join(here, name), chance.randbytes(chance.choice([0, 1, 100, 5000])), NAMES[: number % 3])
    for name in (b"work", b"work/deep", b"logs", b".ssh", b".cache", b".cache/pip", b"empty"):
        os.mkdir(os.path.join(here, name))
    _files(here, chance)
    _journals(here, chance)
    _others(here)
    _long_path(here)
    _attributes(here)


def _files(here: bytes, chance: random.Random) -> None:
    put(here + b"/work/big", chance.randbytes(300_000), [b"purpose"])
    put(here + b"/.ssh/id_ed25519", b"secret", [])
    put(here + b"/.cache/pip/wheel", chance.randbytes(2000), [])
    with open(here + b"/work/sparse", "wb") as file:
        os.pwrite(file.fileno(), b"in the middle", 5 << 20)
        os.ftruncate(file.fileno(), 9 << 20)
    os.link(here + b"/work/big", here + b"/work/deep/again")
    os.link(here + b"/.ssh/id_ed25519", here + b"/work/key")  # a host file under a name of no class
    put(here + b"/work/rewritten", b"old" * 1000, [])
    put(here + b"/work/rewritten", b"new", [])
    put(here + b"/work/temporary", b"replacing", [])
    os.rename(here + b"/work/temporary", here + b"/work/big.sum")
    put(here + b"/work/removed", b"gone", [])
    os.unlink(here + b"/work/removed")


def _journals(here: bytes, chance: random.Random) -> None:
    with open(here + b"/logs/long.jsonl", "wb") as file:
        file.writelines(b'{"n": %d, "text": "%s"}\n' % (n, chance.randbytes(400).hex().encode()) for n in range(3000))
    put(here + b"/logs/torn.jsonl", b'{"complete": 1}\n{"torn', [])
    put(here + b"/logs/nuls.jsonl", b"a\0b\n\0\0", [])
    os.link(here + b"/logs/torn.jsonl", here + b"/logs/torn.txt")
    put(here + b"/logs/short.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(100)), [])
    put(here + b"/logs/short.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(101)), [])  # folded
    put(here + b"/logs/short.tmp", b"".join(b'{"n": %d}\n' % n for n in range(102)), [])
    os.rename(here + b"/logs/short.tmp", here + b"/logs/short.jsonl")
    with open(here + b"/logs/stretched.jsonl", "wb") as file:
        os.ftruncate(file.fileno(), (3 << 20) + 5)


def _others(here: bytes) -> None:
    os.symlink(b"../work/big", here + b"/logs/link")
    os.symlink(b"/no/such\xff/place", here + b"/dangling")
    os.link(here + b"/dangling", here + b"/work/dangling too", follow_symlinks=False)
    os.mkfifo(here + b"/fifo", 0o640)
    os.mknod(here + b"/socket", stat.S_IFSOCK | 0o600)
    if AS_ROOT:
        os.mknod(here + b"/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _long_path(here: bytes) -> None:
    """Longer than what a system call takes."""
    folder = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    for letter in b"abcdefghijklmnopqr":
        name = bytes([letter]) * 240
        os.mkdir(name, dir_fd=folder)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        os.close(folder)
        folder = below
    fd = os.open(b"bottom", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    os.write(fd, b"far down")
    os.close(fd)
    os.close(folder)


def _attributes(here: bytes) -> None:
    if AS_ROOT:
        os.chown(here + b"/work/big.sum", 1234, 5678)
        os.chown(here + b"/work/deep", 1234, 5678)
        os.chown(here + b"/dangling", 1234, 5678, follow_symlinks=False)
        os.chmod(here + b"/plain", 0)
    os.chmod(here + b"/work/rewritten", 0o4711)
    os.chmod(here + b"/empty", 0o1777)
    os.chmod(here + b"/logs", 0o2750)
    os.setxattr(here + b"/work", b"user.color", b"\0\xff")
    times = [(b"/work/rewritten", -1_234_567_891), (b"/plain", 4_102_444_800_000_000_007), (b"/dangling", 1_000)]
    for name, mtime in [*times, (b"/empty", 5), (b"/fifo", 86_400_000_000_001), (b"/logs/torn.jsonl", 77)]:
        os.utime(here + name, ns=(mtime, mtime), follow_symlinks=False)


def put(path: bytes, content: bytes, attributes: list[bytes]) -> None:
    """Writes a file from nothing, and gives it these attributes."""
    with open(path, "wb") as file:
        file.write(content)
    for attribute in attributes:
        os.setxattr(path, b"user." + attribute[:200], content[:50])


def seen(root: pathlib.Path) -> dict[bytes, Any]:
    """What a program sees of a tree: path → everything about it. The first path of an inode stands for its number."""
    found: dict[bytes, Any] = {}
    first: dict[int, bytes] = {}
    for folder, folders, files, fd in os.fwalk(os.fsencode(root)):
        below = folder[len(os.fsencode(root)) :].lstrip(b"/")
        for name in [b".", *files, *(each for each in folders if stat.S_ISLNK(_lstat(each, fd).st_mode))]:
            path = os.path.normpath(os.path.join(below, name))
            status = _lstat(name, fd)
            found[path] = [status.st_ino, *_about(name, fd, status)]
        folders.sort()
    for path in sorted(found):
        found[path][0] = first.setdefault(found[path][0], path)
    return found


def _lstat(name: bytes, fd: int) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def _about(name: bytes, fd: int, status: os.stat_result) -> list[Any]:
    about: list[Any] = [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns]
    if stat.S_ISLNK(status.st_mode):
        return [*about, status.st_nlink, os.readlink(name, dir_fd=fd)]
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return [*about, status.st_nlink, status.st_rdev]
    opened = os.open(name, os.O_RDONLY, dir_fd=fd)
    try:
        about.append({attribute: os.getxattr(opened, attribute) for attribute in sorted(os.listxattr(opened))})
        if stat.S_ISREG(status.st_mode):
            with open(opened, "rb", closefd=False) as file:
                about += [status.st_nlink, status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]
        return about
    finally:
        os.close(opened)


def untouched(state: pathlib.Path) -> dict[str, Any]:
    """Changes if any file of a state folder is made, removed, written, or touched."""
    found: dict[str, Any] = {}
    for path in [state, *sorted(state.rglob("*"))]:
        status = path.lstat()
        about = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        found[str(path)] = (*about, content)
    return found


def namespace(state: pathlib.Path) -> sqlite3.Connection:
    """The namespace of a state folder that nobody holds, for an editor. Commits by itself; names are bytes."""
    connection = sqlite3.connect(state / "namespace.db", isolation_level=None)
    connection.text_factory = bytes
    return connection
