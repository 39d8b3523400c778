"""The same operation in a mount and in a plain directory, and everything that may be compared after it.

The plain directory is the model: what a Linux filesystem does is not written down here a second time. `Side` performs
operations in one tree and turns what comes of them into values; `Pair` performs them in both and compares.
"""

import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import pathlib
import stat
import struct
import time
from collections.abc import Callable
from typing import Any

PAST = (-1_000_000_001, 0, 1, 1_500_000_000_123_456_789)
"""Times to be set, before 1970 too. What has one of them was set to it: they are compared exactly."""
TICK_NS = 20_000_000
"""A change may be dated by the kernel's last tick."""
WHOLE_BYTES = 1 << 23
END_BYTES = 1 << 16
AT_FDCWD, AT_SYMLINK_NOFOLLOW, UTIME_OMIT = -100, 0x100, (1 << 30) - 2
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def renameat2(old: bytes, new: bytes, flags: int) -> None:
    _checked(_libc.renameat2(AT_FDCWD, old, AT_FDCWD, new, flags))


def _times(atime_ns: int | None, mtime_ns: int | None) -> bytes:
    fields = []
    for time_ns in (atime_ns, mtime_ns):
        fields += (0, UTIME_OMIT) if time_ns is None else divmod(time_ns, 1_000_000_000)
    return struct.pack("@4l", *fields)


def utimensat(path: bytes, atime_ns: int | None, mtime_ns: int | None, follow: bool) -> None:
    """None leaves a time alone."""
    flags = 0 if follow else AT_SYMLINK_NOFOLLOW
    _checked(_libc.utimensat(AT_FDCWD, path, _times(atime_ns, mtime_ns), flags))


def futimens(fd: int, atime_ns: int | None, mtime_ns: int | None) -> None:
    _checked(_libc.futimens(fd, _times(atime_ns, mtime_ns)))


@dataclasses.dataclass(frozen=True)
class Look:
    """One inode as stat shows it. `ino` and times are of its own side only."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    rdev: int
    ino: int = dataclasses.field(compare=False)
    atime_ns: int = dataclasses.field(compare=False)
    mtime_ns: int = dataclasses.field(compare=False)
    ctime_ns: int = dataclasses.field(compare=False)

    @classmethod
    def of(cls, found: os.stat_result) -> "Look":
        size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
        times = found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns
        return cls(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, size, found.st_rdev, found.st_ino, *times)


def content(fd: int) -> bytes:
    """All of a file, or both ends of one that is mostly a hole."""
    size = os.fstat(fd).st_size
    if size <= WHOLE_BYTES:
        return os.pread(fd, size + 1, 0)
    return os.pread(fd, END_BYTES, 0) + os.pread(fd, END_BYTES + 1, size - END_BYTES)


class Side:
    """One tree, and the descriptors that are open in it, in numbered slots."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.slots: dict[int, int] = {}

    def path(self, name: bytes) -> bytes:
        return self.root + b"/" + name

    def attempt(self, act: Callable[["Side"], Any]) -> object:
        """What comes of it: a value, or the name of an error."""
        try:
            return act(self)
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    # What takes more than one call.

    def open(self, slot: int, name: bytes, flags: int, mode: int) -> None:
        fd = os.open(self.path(name), flags | os.O_NONBLOCK, mode)  # a fifo must not wait for its other end
        self.close(slot)
        self.slots[slot] = fd

    def close(self, slot: int) -> None:
        fd = self.slots.pop(slot, None)
        if fd is not None:
            os.close(fd)

    def close_all(self) -> None:
        """Also of a mount that is dead."""
        while self.slots:
            with contextlib.suppress(OSError):
                os.close(self.slots.popitem()[1])

    def store(self, slot: int, offset: int, data: bytes, sync: bool) -> None:
        """Through a shared mapping."""
        size = os.fstat(self.slots[slot]).st_size
        with mmap.mmap(self.slots[slot], size) as mapped:
            at = min(offset, size)
            mapped[at : at + len(data)] = data[: size - at]
            if sync:
                mapped.flush()

    def set_xattr(self, what: bytes | int, name: str, value: bytes, flags: int) -> None:
        """Not if it has this value: that is a change in some filesystems only."""
        with contextlib.suppress(OSError):
            if os.getxattr(what, name) == value:
                return
        os.setxattr(what, name, value, flags)

    def list(self, name: bytes) -> list[tuple[bytes, str]]:
        with os.scandir(self.path(name)) as entries:
            found = list(entries)
        for entry in found:
            assert entry.inode() == os.lstat(entry.path).st_ino, f"d_ino of {entry.name!r}"
        return sorted((entry.name, _kind(entry)) for entry in found)

    # What there is.

    def tree(self) -> dict[bytes, tuple[Look, object, object]]:
        """Every name: its inode, its content or target, its xattrs."""
        found: dict[bytes, tuple[Look, object, object]] = {}
        pending = [b""]
        while pending:
            name = pending.pop()
            path = self.path(name) if name else self.root
            look = Look.of(os.lstat(path))
            inside: object = None
            if stat.S_ISDIR(look.mode):
                inside = sorted(os.listdir(path))
                pending += [name + b"/" + each if name else each for each in os.listdir(path)]
            elif stat.S_ISLNK(look.mode):
                inside = os.readlink(path)
            elif stat.S_ISREG(look.mode):
                fd = os.open(path, os.O_RDONLY)
                inside = content(fd)
                os.close(fd)
            found[name] = look, inside, self.attempt(lambda _, path=path: _xattrs(path))  # type: ignore[misc]
        return found

    def held(self) -> dict[int, tuple[Look, object]]:
        """What is behind the open descriptors, with a name or without."""
        found: dict[int, tuple[Look, object]] = {}
        for slot, fd in self.slots.items():
            look = Look.of(os.fstat(fd))
            inside: object = None
            if stat.S_ISREG(look.mode):
                inside = self.attempt(lambda _, fd=fd: content(fd))  # type: ignore[misc]
            found[slot] = look, inside
        return found


def _kind(entry: "os.DirEntry[bytes]") -> str:
    for kind, holds in (("directory", entry.is_dir), ("file", entry.is_file)):
        if holds(follow_symlinks=False):
            return kind
    return "link" if entry.is_symlink() else "other"


def _xattrs(path: bytes) -> list[tuple[str, bytes]]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]


def exact_clock(folder: pathlib.Path) -> bool:
    """Whether the plain filesystem shows every change in its times, however soon it follows a look."""
    path = folder / "clock"
    path.touch()
    for _ in range(20):
        before = path.stat().st_mtime_ns
        path.write_bytes(b"x")
        if path.stat().st_mtime_ns == before:
            return False
    path.unlink()
    return True


class Pair:
    """A mount and a plain directory in step."""

    def __init__(self, mounted: bytes, plain: bytes, *, exact: bool) -> None:
        self.mounted, self.plain = Side(mounted), Side(plain)
        self.exact = exact
        self._partner: dict[int, int] = {}  # inodes of the mount -> of the plain directory
        self._seen: dict[int, tuple[Look, Look, int]] = {}  # by inode of the mount: how both looked last, and when

    def both(self, act: Callable[[Side], Any]) -> object:
        """Does it in both, and gives what came of it in the plain one."""
        expected = self.plain.attempt(act)
        found = self.mounted.attempt(act)
        assert found == expected, f"{found!r} instead of {expected!r}"
        return expected

    def compare(self, *names: bytes) -> None:
        """What is at these names and behind all open descriptors looks alike."""
        for name in names:
            looks = [side.attempt(lambda s, n=name: Look.of(os.lstat(s.path(n)))) for side in self._sides]  # type: ignore[misc]
            self._alike(name, *looks)
        assert self.mounted.slots.keys() == self.plain.slots.keys()
        for slot in self.plain.slots:
            looks = [Look.of(os.fstat(side.slots[slot])) for side in self._sides]
            self._alike(slot, *looks)

    def compare_all(self) -> None:
        """Everything looks alike: names, attributes, bytes, targets, xattrs; also what has no name any more."""
        found, expected = self.mounted.tree(), self.plain.tree()
        assert found.keys() == expected.keys()
        for name, (look, inside, xattrs) in expected.items():
            assert _same(found[name][1], inside), f"content of {name!r}"
            assert found[name][2] == xattrs, f"xattrs of {name!r}"
            self._alike(name, found[name][0], look)
        held, expected_held = self.mounted.held(), self.plain.held()
        for slot, (look, inside) in expected_held.items():
            assert _same(held[slot][1], inside), f"content behind {slot}"
            self._alike(slot, held[slot][0], look)

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.mounted, self.plain

    def _alike(self, what: object, found: object, expected: object) -> None:
        assert found == expected, f"{what!r}: {found} instead of {expected}"
        if not isinstance(found, Look) or not isinstance(expected, Look):
            return
        assert self._partner.setdefault(found.ino, expected.ino) == expected.ino, f"{what!r} is another inode"
        if expected.atime_ns in PAST:  # else somebody has read it, which a mount does not date
            assert found.atime_ns == expected.atime_ns, f"{what!r}: atime {found.atime_ns}"
        if expected.mtime_ns in PAST or found.mtime_ns in PAST:
            assert found.mtime_ns == expected.mtime_ns, f"{what!r}: mtime {found.mtime_ns}"
        before = self._seen.get(found.ino)
        self._seen[found.ino] = found, expected, time.time_ns()
        if before is None:
            return
        for field in ("mtime_ns", "ctime_ns"):
            ours, theirs = getattr(found, field), getattr(expected, field)
            if theirs in PAST:
                continue
            if theirs != getattr(before[1], field):
                assert ours >= before[2] - TICK_NS, f"{what!r}: {field} stays behind, at {ours}"
            elif self.exact:
                assert ours == getattr(before[0], field), f"{what!r}: {field} moves to {ours}"

    def forget(self) -> None:
        """Inodes without a name may come back as others: called when no descriptor is open."""
        assert not self.mounted.slots
        self._partner.clear()
        self._seen.clear()


def _same(found: object, expected: object) -> bool:
    """Compared apart from the assert, which would print megabytes."""
    return found == expected
