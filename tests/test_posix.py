"""What Linux programs expect of a filesystem: modes, owners, times, open flags, extended attributes.

Wherever ext4 gives the answer, the same is played on a plain folder and the results are compared. What is done to
files is done to a journal as well.
"""

import ctypes
import errno
import os
import pathlib
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from mounting import Mount, run
from processes import as_user, errno_of

from deltapool.fs import control

NOBODY, GROUP = 65534, 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of several users: only root can make them")
both_classes = pytest.mark.parametrize("suffix", ["", ".jsonl"], ids=["work", "journal"])
libc = ctypes.CDLL(None, use_errno=True)


# --- modes and owners


@as_root
def test_a_setgid_folder_gives_its_group_to_what_is_made_in_it(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def play(place: pathlib.Path) -> list[tuple[int, int, int]]:
        shared = place / "shared"
        shared.mkdir()
        os.chown(shared, 0, GROUP)
        os.chmod(shared, 0o2777)

        def make() -> None:
            os.umask(0)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o644))
            os.close(os.open("set-id", os.O_CREAT | os.O_WRONLY, 0o6755))
            os.close(os.open("f.jsonl", os.O_CREAT | os.O_WRONLY, 0o600))
            os.mkdir("folder", 0o755)
            os.mkfifo("fifo", 0o640)
            os.symlink("file", "link")

        as_user(NOBODY, make, shared)
        found = [os.lstat(shared / name) for name in sorted(os.listdir(shared))]
        return [(each.st_mode, each.st_uid, each.st_gid) for each in found]

    seen = play(folder)
    assert {gid for _, _, gid in seen} == {GROUP}
    assert seen == play(tmp_path)


def shrunk(path: str) -> None:
    os.truncate(path, 3)


def written(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"new")
    os.close(fd)


def written_equal(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"con")
    os.close(fd)


def appended(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"new")
    os.close(fd)


def truncated_by_descriptor(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.ftruncate(fd, 100)
    os.close(fd)


def opened_with_truncation(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def given_to_its_owner(path: str) -> None:
    os.chown(path, NOBODY, NOBODY)


def only_touched(path: str) -> None:
    os.utime(path)
    os.chown(path, -1, -1)


MODES = [0o6755, 0o4711, 0o2755, 0o2644, 0o6644]
CHANGES = [
    shrunk,
    written,
    written_equal,
    appended,
    truncated_by_descriptor,
    opened_with_truncation,
    given_to_its_owner,
    only_touched,
]


@as_root
@both_classes
def test_set_id_bits_go_when_the_owner_changes_a_file(
    folder: pathlib.Path, tmp_path: pathlib.Path, suffix: str
) -> None:
    def play(place: pathlib.Path) -> list[tuple[str, str, str]]:
        os.chmod(place, 0o777)
        made = [(change, f"{change.__name__}{mode:o}{suffix}", mode) for change in CHANGES for mode in MODES]
        for _, name, mode in made:
            (place / name).write_bytes(b"content")
            os.chown(place / name, NOBODY, NOBODY)
            os.chmod(place / name, mode)
        as_user(NOBODY, lambda: [change(name) for change, name, _ in made], place)
        found = [f"{stat.S_IMODE((place / name).stat().st_mode):o}" for _, name, _ in made]
        return [(change.__name__, f"{mode:o}", after) for (change, _, mode), after in zip(made, found, strict=True)]

    assert play(folder) == play(tmp_path)


@as_root
def test_set_id_bits_go_when_root_gives_a_file_away(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def play(place: pathlib.Path) -> list[int]:
        results = []
        for mode in (0o6755, 0o4711, 0o2755, 0o2644):
            path, directory = place / f"f{mode:o}", place / f"d{mode:o}"
            path.write_bytes(b"content")
            directory.mkdir()
            for each in (path, directory):
                os.chmod(each, mode)
                os.chown(each, NOBODY, GROUP)
                results.append(each.stat().st_mode)
        return results

    assert play(folder) == play(tmp_path)


@as_root
def test_permissions_hold_between_users(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What uid 65534 may and may not do to what root made, by errno."""

    def play(place: pathlib.Path) -> list[int]:
        for name, mode in (("closed", 0o600), ("open", 0o666), ("readable", 0o644), ("f.jsonl", 0o620)):
            (place / name).write_bytes(b"content")
            os.chmod(place / name, mode)
        for name, mode in (("public", 0o1777), ("private", 0o700), ("listable", 0o744), ("passable", 0o711)):
            (place / name).mkdir()
            (place / name / "inside").write_bytes(b"x")
            os.chmod(place / name, mode)
        os.chmod(place, 0o755)

        answers: list[int] = as_user(NOBODY, lambda: [errno_of(attempt) for attempt in ATTEMPTS], place)
        owner = (place / "public" / "newer").stat()
        return [*answers, owner.st_uid, owner.st_gid]

    assert play(folder) == play(tmp_path)


FILES = ["closed", "open", "readable", "f.jsonl"]
FOLDERS = ["public", "private", "listable", "passable"]
WAYS = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND]
ATTEMPTS: list[Callable[[], Any]] = [
    *(partial(os.open, name, flags) for name in FILES for flags in WAYS),
    *(partial(os.listdir, name) for name in FOLDERS),
    *(partial(os.stat, f"{name}/inside") for name in FOLDERS),
    *(partial(os.open, f"{name}/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL) for name in FOLDERS),
    *(partial(os.unlink, f"{name}/inside") for name in FOLDERS),
    partial(os.rename, "public/new", "public/newer"),
    partial(os.rename, "public/newer", "newest"),
    partial(os.chmod, "open", 0o777),
    partial(os.chown, "open", NOBODY, NOBODY),
    partial(os.chown, "public/newer", 0, 0),
    partial(os.utime, "open"),
    partial(os.utime, "open", (1, 1)),
    partial(os.utime, "readable"),
    partial(os.truncate, "readable", 0),
    partial(os.setxattr, "readable", "user.x", b"1"),
    partial(os.getxattr, "closed", "user.x"),
    partial(os.link, "open", "public/link"),
    partial(os.mkdir, "public/mine"),
    partial(os.rmdir, "public/mine"),
]


def test_all_modes_and_owners_survive_a_remount(shared: Mount, folder: pathlib.Path) -> None:
    made = {}
    for mode in (0o000, 0o400, 0o1777, 0o2755, 0o4755, 0o644):
        path, directory = folder / f"f{mode:o}.jsonl", folder / f"d{mode:o}"
        path.write_bytes(b"x")
        directory.mkdir()
        for each in (path, directory):
            if os.geteuid() == 0:
                os.chown(each, mode + 1, mode + 2)
            os.chmod(each, mode)
            made[each] = (each.stat().st_mode, each.stat().st_uid, each.stat().st_gid, each.stat().st_ctime_ns)
            assert stat.S_IMODE(each.stat().st_mode) == mode
    shared.remount()
    for each, expected in made.items():
        found = each.stat()
        assert (found.st_mode, found.st_uid, found.st_gid, found.st_ctime_ns) == expected


# --- times

UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
NOFOLLOW = 0x100


def utimensat(path: pathlib.Path, atime: tuple[int, int], mtime: tuple[int, int], flags: int = 0) -> None:
    times = (ctypes.c_long * 4)(*atime, *mtime)
    if libc.utimensat(-100, os.fsencode(path), times, flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def things(place: pathlib.Path) -> list[pathlib.Path]:
    made = [place / name for name in ("file", "f.jsonl", "folder", "fifo", "link")]
    made[0].write_bytes(b"x")
    made[1].write_bytes(b"x\n")
    made[2].mkdir()
    os.mkfifo(made[3])
    made[4].symlink_to("file")
    return made


def test_each_time_is_set_or_left_alone(shared: Mount, folder: pathlib.Path) -> None:
    made = things(folder)
    for path in made:
        utimensat(path, (1_000_000_000, 1), (1_500_000_000, 999_999_999), NOFOLLOW)
        before = path.lstat()
        assert (before.st_atime_ns, before.st_mtime_ns) == (10**18 + 1, 1_500_000_000_999_999_999)
        utimensat(path, (0, UTIME_OMIT), (7, 5), NOFOLLOW)
        assert (path.lstat().st_atime_ns, path.lstat().st_mtime_ns) == (10**18 + 1, 7_000_000_005)
        utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT), NOFOLLOW)
        assert path.lstat().st_atime_ns >= before.st_ctime_ns
        assert path.lstat().st_mtime_ns == 7_000_000_005
        before = path.lstat()
        utimensat(path, (0, UTIME_OMIT), (0, UTIME_OMIT), NOFOLLOW)
        assert path.lstat() == before
    kept = [(path.lstat().st_atime_ns, path.lstat().st_mtime_ns) for path in made]
    shared.remount()
    assert [(path.lstat().st_atime_ns, path.lstat().st_mtime_ns) for path in made] == kept


OLD = [(-1, 500_000_000), (-86_400 * 365 * 60, 1), (0, 0), (1 << 33, 999)]


@pytest.mark.parametrize("time", OLD)
def test_times_before_1970_and_after_2106(
    shared: Mount, folder: pathlib.Path, tmp_path: pathlib.Path, time: tuple[int, int]
) -> None:
    def play(place: pathlib.Path) -> list[tuple[int, int]]:
        made = things(place)
        for path in made:
            utimensat(path, time, time, NOFOLLOW)
        control.call(shared.state, "flush", 60)
        return [(path.lstat().st_atime_ns, path.lstat().st_mtime_ns) for path in made]

    nanoseconds = time[0] * 10**9 + time[1]
    assert play(folder) == play(tmp_path) == [(nanoseconds, nanoseconds)] * 5


@both_classes
def test_mtime_and_ctime_move_with_what_changes(folder: pathlib.Path, tmp_path: pathlib.Path, suffix: str) -> None:
    """Which of the two times each call moves."""

    def play(place: pathlib.Path) -> list[tuple[str, bool, bool]]:
        path = place / f"f{suffix}"
        path.write_bytes(b"content")
        fd = os.open(path, os.O_RDWR)
        calls: dict[str, Callable[[], Any]] = {
            "write": lambda: os.write(fd, b"x"),
            "write of equal bytes": lambda: os.pwrite(fd, b"x", 0),
            "ftruncate": lambda: os.ftruncate(fd, 3),
            "ftruncate to the same length": lambda: os.ftruncate(fd, 3),
            "read": lambda: os.pread(fd, 3, 0),
            "chmod": lambda: os.chmod(path, 0o600),
            "setxattr": lambda: os.setxattr(path, "user.x", b"1"),
            "getxattr": lambda: os.getxattr(path, "user.x"),
            "removexattr": lambda: os.removexattr(path, "user.x"),
            "link": lambda: os.link(path, place / f"l{suffix}"),
            "unlink": lambda: os.unlink(place / f"l{suffix}"),
            "rename": lambda: os.rename(path, place / f"r{suffix}"),
            "fsync": lambda: os.fsync(fd),
        }
        results = []
        for name, call in calls.items():
            os.utime(fd, ns=(1, 1))
            before = os.fstat(fd)
            ticked = before.st_ctime_ns
            while os.stat(place).st_ctime_ns <= ticked:  # the clock of a filesystem ticks every few milliseconds
                os.utime(place)
            call()
            after = os.fstat(fd)
            results.append((name, after.st_mtime_ns != 1, after.st_ctime_ns > before.st_ctime_ns))
        os.close(fd)
        return results

    assert play(folder) == play(tmp_path)


def test_a_file_is_never_older_after_a_touch_than_before_it(folder: pathlib.Path) -> None:
    path, other, times = folder / "f", folder / "other", []
    for _ in range(50):
        path.write_bytes(b"x")
        times.append(path.stat().st_mtime_ns)
        other.touch()
        times.append(other.stat().st_mtime_ns)
    assert times == sorted(times)


# --- open


def test_open_flags_fail_as_they_should(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def play(place: pathlib.Path) -> dict[tuple[str, int], int]:
        (place / "file").write_bytes(b"x")
        (place / "f.jsonl").write_bytes(b"x")
        (place / "folder").mkdir()
        (place / "link").symlink_to("file")
        (place / "dangling").symlink_to("nothing")
        (place / "loop").symlink_to("loop")
        (place / "to-folder").symlink_to("folder")
        names = [*os.listdir(place), "missing", "file/x", "folder/", "file/", "link/", "missing/", "folder/."]
        names += ["folder/../file", "to-folder/../file"]
        flags = {
            *(os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH, os.O_RDONLY | os.O_NOFOLLOW, os.O_PATH | os.O_NOFOLLOW),
            *(os.O_RDONLY | os.O_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, os.O_WRONLY | os.O_DIRECTORY),
            *(os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.O_RDONLY | os.O_CREAT),
        }
        results = {}
        for name in sorted(names):
            for flag in sorted(flags):
                results[name, flag] = errno_of(lambda: os.close(os.open(f"{place}/{name}", flag)))  # noqa: B023
                for made in ("missing", "nothing"):
                    (place / made).unlink(missing_ok=True)
        return results

    assert play(folder) == play(tmp_path)


def test_an_o_path_descriptor_names_and_no_more(folder: pathlib.Path) -> None:
    (folder / "file").write_bytes(b"x")
    fd = os.open(folder / "file", os.O_PATH)
    assert os.fstat(fd).st_ino == (folder / "file").stat().st_ino
    assert errno_of(lambda: os.read(fd, 1)) == errno.EBADF
    assert os.readlink(f"/proc/self/fd/{fd}") == str(folder / "file")
    os.rename(folder / "file", folder / "renamed")
    assert os.readlink(f"/proc/self/fd/{fd}") == str(folder / "renamed")
    os.close(fd)


# --- extended attributes


@both_classes
def test_extended_attributes_are_kept(shared: Mount, folder: pathlib.Path, tmp_path: pathlib.Path, suffix: str) -> None:
    def play(place: pathlib.Path) -> list[Any]:
        path, directory = place / f"f{suffix}", place / "d"
        path.write_bytes(b"x")
        directory.mkdir()
        big = bytes(range(256)) * 8
        results: list[Any] = []
        for target in (path, directory):
            for name, value in (("user.a", b"1"), ("user.empty", b""), ("user.big", big), ("user.é", b"\0\xff")):
                os.setxattr(target, name, value)
            os.setxattr(target, "user.a", b"2")
            results += [
                errno_of(lambda: os.setxattr(target, "user.a", b"3", os.XATTR_CREATE)),  # noqa: B023
                errno_of(lambda: os.setxattr(target, "user.b", b"3", os.XATTR_REPLACE)),  # noqa: B023
                errno_of(lambda: os.removexattr(target, "user.b")),  # noqa: B023
                errno_of(lambda: os.getxattr(target, "user.b")),  # noqa: B023
                errno_of(lambda: os.setxattr(target, "user.b", bytes(70_000))),  # noqa: B023
                errno_of(lambda: os.setxattr(target, "user." + "n" * 251, b"")),  # noqa: B023
                errno_of(lambda: os.setxattr(target, "nospace", b"")),  # noqa: B023
                libc.getxattr(os.fsencode(target), b"user.big", ctypes.create_string_buffer(10), 10),
                libc.getxattr(os.fsencode(target), b"user.big", None, 0),
            ]
            os.removexattr(target, "user.empty")
            results += [(name, os.getxattr(target, name)) for name in sorted(os.listxattr(target))]
        with open(path, "rb") as file:
            path.unlink()
            results.append(os.getxattr(file.fileno(), "user.a"))
            os.setxattr(file.fileno(), "user.late", b"1")
            results.append(sorted(os.listxattr(file.fileno())))
        return results

    assert play(folder) == play(tmp_path)
    shared_state = control.call(shared.state, "status", 60)
    assert shared_state["fuse"]["handler_errors"] == 0


@as_root
def test_foreign_attributes_are_refused_and_own_ones_go_on(folder: pathlib.Path) -> None:
    """Gets find nothing, sets are not supported, so that programs go on without them; user.* is never switched off."""
    path = folder / "f"
    path.write_bytes(b"x")
    acl = b"\x02\0\0\0" + b"\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff"
    capability = b"\x01\0\0\x02" + bytes(16)
    for name, value in (
        ("system.posix_acl_access", acl),
        ("security.capability", capability),
        ("security.selinux", b"label"),
        ("trusted.overlay.opaque", b"y"),
    ):
        assert errno_of(lambda: os.getxattr(path, name)) in (errno.ENODATA, errno.EOPNOTSUPP)  # noqa: B023
        assert errno_of(lambda: os.setxattr(path, name, value)) == errno.EOPNOTSUPP  # noqa: B023
        assert errno_of(lambda: os.removexattr(path, name)) in (errno.ENODATA, errno.EOPNOTSUPP)  # noqa: B023
        os.setxattr(path, "user.x", name.encode())
        assert os.getxattr(path, "user.x") == name.encode()
    assert os.listxattr(path) == ["user.x"]
    run(["cp", "-a", path, folder / "copy"])
    assert os.getxattr(folder / "copy", "user.x") == b"trusted.overlay.opaque"
    run(["ls", "-la", folder])
    with pytest.raises(AssertionError, match="Operation not supported"):
        run(["setfacl", "-m", "u:65534:r", path])
    assert "user::rw-" in run(["getfacl", "-p", path])


def test_a_computed_attribute_is_read_only_and_not_listed(folder: pathlib.Path) -> None:
    path = folder / "f.jsonl"
    path.write_bytes(b"x\n")
    assert os.getxattr(path, "user.deltapool.class") == b"journal"
    assert os.listxattr(path) == []
    assert errno_of(lambda: os.setxattr(path, "user.deltapool.class", b"work")) == errno.EPERM
    assert errno_of(lambda: os.removexattr(path, "user.deltapool.class")) == errno.EPERM
    assert errno_of(lambda: os.getxattr(path, "user.deltapool.no-such")) == errno.ENODATA
