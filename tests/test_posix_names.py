"""What Linux programs expect of a filesystem: names. Rename in all its forms, folders and listings, links, fifos.

Wherever ext4 gives the answer, the same is played on a plain folder and the results are compared.
"""

import ctypes
import errno
import os
import pathlib
import random
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from mounting import Mount
from processes import errno_of, together

libc = ctypes.CDLL(None, use_errno=True)
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def renameat2(old: str | pathlib.Path, new: str | pathlib.Path, flags: int) -> None:
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def tree(place: pathlib.Path) -> dict[str, bytes | None]:
    """Every path below with the content of files and the targets of links; None for folders."""
    found: dict[str, bytes | None] = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = os.readlink(os.fsencode(path))
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


def make_tree(place: pathlib.Path) -> None:
    for name in ("empty", "empty2", "full/sub", "other"):
        (place / name).mkdir(parents=True)
    for name in ("a", "b", "c.jsonl", "d.jsonl", "full/x", "full/sub/y.jsonl"):
        (place / name).write_bytes(f"content of {name}\n".encode())
    (place / "link").symlink_to("a")
    (place / "dangling").symlink_to("nothing")
    os.link(place / "a", place / "a2")


NAMES = ["a", "a2", "b", "c.jsonl", "link", "dangling", "empty", "full", "full/x", "full/sub", "full/new", "missing"]


@pytest.mark.parametrize("flags", [0, NOREPLACE, EXCHANGE, NOREPLACE | EXCHANGE])
def test_every_rename_does_what_ext4_does(folder: pathlib.Path, tmp_path: pathlib.Path, flags: int) -> None:
    """Each pair of names in turn, on what the ones before have left; the errno of each, and the tree in the end."""

    def play(place: pathlib.Path) -> tuple[dict[tuple[str, str], int], dict[str, bytes | None]]:
        make_tree(place)
        pairs = [(old, new) for old in NAMES for new in NAMES]
        random.Random(flags).shuffle(pairs)
        answers = {
            (old, new): errno_of(lambda old=old, new=new: renameat2(place / old, place / new, flags))  # type: ignore[misc] # called at once
            for old, new in pairs
        }
        return answers, tree(place)

    assert play(folder) == play(tmp_path)


def test_a_whiteout_is_not_offered(folder: pathlib.Path) -> None:
    (folder / "a").write_bytes(b"x")
    assert errno_of(lambda: renameat2(folder / "a", folder / "b", WHITEOUT)) == errno.EINVAL
    assert os.listdir(folder) == ["a"]


ERRORS: list[tuple[Callable[..., Any], str, str]] = [
    (os.mkdir, "a", ""),
    (os.mkdir, "missing/x", ""),
    (os.mkdir, "a/x", ""),
    (os.rmdir, "full", ""),
    (os.rmdir, "a", ""),
    (os.rmdir, "empty/.", ""),
    (os.rmdir, "missing", ""),
    (os.unlink, "empty", ""),
    (os.unlink, "a/", ""),
    (os.unlink, "missing", ""),
    (os.listdir, "a", ""),
    (os.readlink, "a", ""),
    (os.readlink, "empty", ""),
    (os.symlink, "x", "a"),
    (os.symlink, "x", "missing/x"),
    (os.symlink, "x" * 5000, "long"),
    (os.link, "a", "b"),
    (os.link, "empty", "hard"),
    (os.link, "missing", "hard"),
    (os.truncate, "empty", "0"),
    (os.mkdir, "n" * 256, ""),
    (os.mkdir, "/".join(["full"] * 2000), ""),
]


def test_what_must_fail_fails_with_the_errno_of_ext4(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def play(place: pathlib.Path) -> list[tuple[str, str, str, int]]:
        make_tree(place)
        answers = []
        for function, first, second in ERRORS:
            arguments: list[Any] = [first if function is os.symlink else f"{place}/{first}"]
            if second:
                arguments.append(0 if second == "0" else f"{place}/{second}")
            answers.append((function.__name__, first, second, errno_of(partial(function, *arguments))))
        return answers

    seen = play(folder)
    assert all(number for *_, number in seen)
    assert seen == play(tmp_path)


def test_links_and_times_of_folders_are_true(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """After each step: how many links each folder has, and whether its mtime and ctime moved."""

    def play(place: pathlib.Path) -> list[Any]:
        make_tree(place)
        (place / "full" / "x2").write_bytes(b"x")
        steps: dict[str, Callable[[], Any]] = {
            "create": lambda: (place / "empty" / "new").touch(),
            "write": lambda: (place / "empty" / "new").write_bytes(b"x"),
            "chmod": lambda: (place / "empty" / "new").chmod(0o600),
            "mkdir": lambda: (place / "empty" / "d").mkdir(),
            "mkdir below": lambda: (place / "empty" / "d" / "e").mkdir(),
            "rename within": lambda: os.rename(place / "full" / "x", place / "full" / "z"),
            "rename onto": lambda: os.rename(place / "full" / "z", place / "full" / "x2"),
            "rename file out": lambda: os.rename(place / "full" / "x2", place / "other" / "x"),
            "rename folder out": lambda: os.rename(place / "full" / "sub", place / "other" / "sub"),
            "replace folder": lambda: os.rename(place / "other" / "sub", place / "empty" / "d" / "e"),
            "exchange": lambda: renameat2(place / "empty" / "d", place / "other" / "x", EXCHANGE),
            "symlink": lambda: os.symlink("x", place / "empty2" / "s"),
            "link": lambda: os.link(place / "a", place / "empty2" / "l"),
            "mkfifo": lambda: os.mkfifo(place / "empty2" / "f"),
            "unlink": lambda: os.unlink(place / "empty2" / "f"),
            "rmdir": lambda: os.rmdir(place / "full"),
        }
        names = ["empty", "empty2", "full", "other", "empty/d", "."]
        results = []
        for name, step in steps.items():
            folders = [place / each for each in names if (place / each).is_dir()]
            for each in folders:
                os.utime(each, ns=(1, 1))
            before = {each: each.stat() for each in folders}
            probe = place / "a"
            while True:  # until the clock of the filesystem has ticked
                os.chmod(probe, 0o644)
                if probe.stat().st_ctime_ns > max(found.st_ctime_ns for found in before.values()):
                    break
            step()
            for each, found in before.items():
                if not each.is_dir():
                    continue
                now = each.stat()
                moved = (now.st_mtime_ns != 1, now.st_ctime_ns != found.st_ctime_ns)
                results.append((name, str(each.relative_to(place)), now.st_nlink, *moved))
        return results

    assert play(folder) == play(tmp_path)


# --- listings


@pytest.fixture(scope="module")
def many(shared: Mount, request: pytest.FixtureRequest) -> pathlib.Path:
    """A folder of 100,000 entries with --full, of 3,000 otherwise: a request carries about a hundred of them."""
    path = shared.path / "many"
    path.mkdir()
    for number in range(100_000 if request.config.getoption("--full") else 3000):
        os.symlink("x", path / f"{number:06}")
    return path


def test_a_listing_is_stable_under_deletion_and_renames(many: pathlib.Path) -> None:
    """Of what stays, each entry is met exactly once. What is removed, renamed or new may be met, once, or not."""
    names, chance = set(os.listdir(many)), random.Random(5)
    order = sorted(names)
    chance.shuffle(order)
    removed, renamed = order[:500], order[500:1000]
    met: list[str] = []
    with os.scandir(many) as entries:
        for number, entry in enumerate(entries):
            met.append(entry.name)
            if number % 4 == 0 and removed:
                os.unlink(many / removed.pop())
                old = renamed.pop()
                os.rename(many / old, many / f"{old}.renamed")
                os.symlink("x", many / f"{old}.new")
    changed = set(order[:1000])
    assert not removed
    assert not renamed
    assert len(met) == len(set(met))
    assert names - changed <= set(met)
    now = set(os.listdir(many))
    assert now == names - changed | {f"{name}.{end}" for name in order[500:1000] for end in ("renamed", "new")}


class Entry(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("length", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


libc.opendir.restype = ctypes.c_void_p
libc.readdir.restype = ctypes.POINTER(Entry)
libc.telldir.restype = ctypes.c_long


class Listing:
    """opendir and its relatives, which Python does not offer."""

    def __init__(self, path: pathlib.Path) -> None:
        self._stream = ctypes.c_void_p(libc.opendir(os.fsencode(path)))
        assert self._stream.value

    def __iter__(self) -> Iterator[str]:
        while entry := libc.readdir(self._stream):
            yield os.fsdecode(entry.contents.name)

    def tell(self) -> int:
        return int(libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        libc.seekdir(self._stream, ctypes.c_long(position))

    def rewind(self) -> None:
        libc.rewinddir(self._stream)

    def close(self) -> None:
        libc.closedir(self._stream)


def test_a_listing_can_be_continued_from_any_place(folder: pathlib.Path) -> None:
    for number in range(500):
        (folder / f"{number:03}").symlink_to("x")
    listing = Listing(folder)
    order, places = [], []
    for name in listing:
        order.append(name)
        places.append(listing.tell())
    assert sorted(order) == sorted([".", "..", *os.listdir(folder)])
    assert len(set(places)) == len(places)
    for index in (0, 1, 2, 130, 300, 10, len(order) - 1):
        listing.seek(places[index])
        assert list(listing) == order[index + 1 :]
    listing.seek(places[100])
    for name in order[90:110]:
        os.unlink(folder / name)
    assert list(listing) == order[110:]
    listing.rewind()
    (folder / "new").symlink_to("x")
    assert sorted(listing) == sorted([".", "..", *os.listdir(folder)])
    listing.close()


def test_a_listing_tells_the_kinds(folder: pathlib.Path) -> None:
    make_tree(folder)
    os.mkfifo(folder / "fifo")
    with os.scandir(folder) as entries:
        for entry in entries:
            found = os.lstat(entry.path)
            assert entry.inode() == found.st_ino
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(found.st_mode)
            assert entry.is_file(follow_symlinks=False) == stat.S_ISREG(found.st_mode)
            assert entry.is_symlink() == stat.S_ISLNK(found.st_mode)
    listing = Listing(folder / "full")
    assert set(listing) == {".", "..", "x", "sub"}
    listing.close()


# --- links and special files


def test_symlinks_hold_any_bytes(shared: Mount, folder: pathlib.Path) -> None:
    targets = [b"x", b"/absolute", b"../" * 300, b"\xff\xfe\n", b"n" * 4095, "漢".encode() * 80]
    for number, target in enumerate(targets):
        os.symlink(target, os.fsencode(folder / str(number)))

    def read() -> list[tuple[bytes, int, int]]:
        paths = [os.fsencode(folder / str(number)) for number in range(len(targets))]
        return [(os.readlink(path), os.lstat(path).st_size, os.lstat(path).st_mode) for path in paths]

    expected = [(target, len(target), stat.S_IFLNK | 0o777) for target in targets]
    assert read() == expected
    shared.remount()
    assert read() == expected


def test_a_replaced_symlink_is_followed_at_once(folder: pathlib.Path) -> None:
    """As `debug/latest`: unlink and symlink, and rename over it. The kernel caches the targets of links."""
    for number in range(5):
        (folder / str(number)).write_text(str(number))
        (folder / "latest").unlink(missing_ok=True)
        (folder / "latest").symlink_to(str(number))
        assert (folder / "latest").read_text() == str(number)
        (folder / "next").symlink_to(f"./{number}")
        os.replace(folder / "next", folder / "latest")
        assert os.readlink(folder / "latest") == f"./{number}"


def test_a_fifo_joins_two_processes(folder: pathlib.Path) -> None:
    os.mkfifo(folder / "fifo", 0o600)
    assert stat.S_ISFIFO((folder / "fifo").stat().st_mode)

    def write() -> None:
        with open(folder / "fifo", "wb") as file:
            file.write(b"through a fifo" * 10_000)

    def read() -> bytes:
        with open(folder / "fifo", "rb") as file:
            return file.read()

    assert together(write, read)[1] == b"through a fifo" * 10_000


def test_a_unix_socket_joins_two_processes(folder: pathlib.Path) -> None:
    os.chdir(folder)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind("s")
            server.listen()
            assert stat.S_ISSOCK(os.stat("s").st_mode)

            def talk() -> bytes:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.connect("s")
                    return client.recv(100)

            def answer() -> None:
                connection, _ = server.accept()
                connection.sendall(b"hello")

            assert together(talk, answer)[0] == b"hello"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as second:
            assert errno_of(lambda: second.bind("s")) == errno.EADDRINUSE
            os.unlink("s")
            second.bind("s")
    finally:
        os.chdir("/")
