"""The field cases about names, identities and what programs ask for (20 to 28, 35): real reports, tried on the mount.

The number in a test's name is that of the case. Sizes are scaled down unless --full is given.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mounting import Mount, deltapool, is_mounted, run, wait_for_end, wait_until
from processes import Counter, as_user, errno_of, together

NOBODY = 65534
MS_REMOUNT = 32
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, or mounts: only root can")
libc = ctypes.CDLL(None, use_errno=True)


def libc_errno(function: Callable[..., int], *arguments: Any) -> int:
    """The errno of a call of libc, 0 if it succeeds."""
    return ctypes.get_errno() if function(*arguments) < 0 else 0


def test_case_20_inode_numbers_stay(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    names = [folder / f"{number}{'.jsonl' if number % 3 == 0 else ''}" for number in range(1000 if full else 200)]
    for path in names:
        path.write_bytes(b"x")
    os.link(names[0], folder / "link")
    (folder / "sub").mkdir()
    names += [folder / "link", folder / "sub"]

    def numbers() -> dict[str, int]:
        with os.scandir(folder) as entries:
            listed = {entry.name: entry.inode() for entry in entries}  # d_ino
        assert {name: (folder / name).stat().st_ino for name in listed} == listed
        return listed

    before, device = numbers(), folder.stat().st_dev
    assert before["link"] == before[names[0].name]
    assert len(set(before.values())) == len(names) - 1
    if os.geteuid() == 0:  # the kernel forgets every name of this filesystem that is not in use
        assert libc.mount(None, os.fsencode(shared.path), None, MS_REMOUNT, None) == 0
    assert numbers() == before
    os.rename(names[1], folder / "renamed")
    os.replace(names[2], names[3])
    expected = dict(before)
    expected["renamed"] = expected.pop(names[1].name)
    expected[names[3].name] = expected.pop(names[2].name)
    assert numbers() == expected
    assert folder.stat().st_dev == device
    shared.remount()
    assert numbers() == expected


@as_root
def test_case_21_a_read_only_file_can_be_copied_by_its_owner(folder: pathlib.Path) -> None:
    os.chown(folder, NOBODY, NOBODY)

    def copy() -> None:
        run(["sh", "-c", "umask 022; echo content > t; chmod 0444 t; cp t t2; cp -p t t3"])
        run(["sh", "-c", "umask 0777; cp t t4"])
        os.umask(0o777)
        fd = os.open("t5", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(fd, b"content\n")
        os.close(fd)

    as_user(NOBODY, copy, folder)
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in ("t", "t2", "t3", "t4", "t5")}
    assert modes == {"t": 0o444, "t2": 0o444, "t3": 0o444, "t4": 0, "t5": 0}
    assert {(folder / name).read_bytes() for name in modes} == {b"content\n"}


def test_case_21_copy_file_range_copies_ranges(folder: pathlib.Path, full: bool) -> None:
    """Beyond 4 GiB in a sparse file, within one file, and with overlapping ranges, which Linux refuses."""
    source, target = folder / "source", folder / "target"
    far = 5 << 30
    with open(source, "w+b", buffering=0) as file, open(target, "w+b", buffering=0) as copy:
        file.write(b"near" * 1000)
        os.pwrite(file.fileno(), b"far" * 1000, far)
        left = far if full else 8000
        while left:
            count = os.copy_file_range(file.fileno(), copy.fileno(), left, offset_src=far + 3000 - left)
            assert count > 0
            left -= count
        assert os.fstat(copy.fileno()).st_size == (far if full else 8000)
        assert os.pread(copy.fileno(), 3000, os.fstat(copy.fileno()).st_size - 3000) == b"far" * 1000
        assert os.copy_file_range(file.fileno(), file.fileno(), 100, 0, far + 3000) == 100
        assert os.pread(file.fileno(), 200, far + 2997) == b"far" + b"near" * 25
        overlapping = errno_of(lambda: os.copy_file_range(file.fileno(), file.fileno(), 100, 0, 50))
        assert overlapping == errno.EINVAL


LOCK_ROUNDS = 20


def locked(fd: int, kind: str) -> Iterator[None]:
    """Takes the lock of a file and gives it back."""
    if kind == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)
        return
    command = fcntl.F_SETLKW if kind == "fcntl" else fcntl.F_OFD_SETLKW
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    yield
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
@pytest.mark.parametrize("name", ["counter", "counter.jsonl"])
def test_case_22_a_counter_under_a_lock_misses_nothing(folder: pathlib.Path, kind: str, name: str) -> None:
    """Signals arrive while the lock is waited for: the call goes on, or ends with EINTR, which Python repeats."""
    path = folder / name
    path.write_bytes(b"0")

    def count() -> int:
        signals = Counter()
        signal.signal(signal.SIGALRM, lambda *_: signals.add())
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for _ in range(LOCK_ROUNDS):
            fd = os.open(path, os.O_RDWR)
            for _ in locked(fd, kind):
                number = int(os.pread(fd, 10, 0))
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d" % (number + 1), 0)
            os.close(fd)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return signals.value

    signals = together(*[count] * 8)
    assert path.read_bytes() == b"%d" % (8 * LOCK_ROUNDS)
    assert sum(signals) > 0


@pytest.mark.parametrize("suffix", ["", ".jsonl"], ids=["work", "journal"])
def test_case_23_hard_links_are_one_file(folder: pathlib.Path, suffix: str) -> None:
    one, two, three = (folder / f"{name}{suffix}" for name in ("one", "two", "three"))
    one.write_bytes(b"content")
    run(["ln", one, two])
    assert (one.stat().st_nlink, one.stat().st_ino) == (2, two.stat().st_ino)
    with open(two, "ab") as file:
        file.write(b" and more")
    assert one.read_bytes() == b"content and more"
    assert one.stat() == two.stat()
    one.unlink()
    assert (two.stat().st_nlink, two.read_bytes()) == (1, b"content and more")
    with open(two, "r+b") as file:
        os.link(f"/proc/self/fd/{file.fileno()}", three, src_dir_fd=file.fileno())  # so that Python follows the link
        assert three.stat().st_ino == two.stat().st_ino
        two.unlink()
        three.unlink()
        gone = errno_of(lambda: os.link(f"/proc/self/fd/{file.fileno()}", three, src_dir_fd=file.fileno()))
        assert gone == errno.ENOENT


def test_case_23_trees_are_copied_by_links(folder: pathlib.Path) -> None:
    source, copy = folder / "source", folder / "copy"
    for number in range(20):
        path = source / f"d{number % 4}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    run(["cp", "-al", source, copy])
    for path in source.rglob("*"):
        twin = copy / path.relative_to(source)
        assert twin.is_dir() if path.is_dir() else twin.stat().st_ino == path.stat().st_ino
        assert path.is_dir() or path.stat().st_nlink == 2
    run(["rm", "-rf", source])
    assert len([path for path in copy.rglob("*") if path.is_file() and path.stat().st_nlink == 1]) == 20


STRANGE = [
    "é".encode(),  # composed
    "e\u0301".encode(),  # decomposed
    b"\xe9",  # Latin-1
    b"\xff\xfe",
    b"a\nb",
    b"a\\b",
    b"%2F",
    b"-rf",
    b"dot.",
    b"space ",
    b" ",
    b"*?[a]",
    b"\x01\x7f\x1b[31m",
    b"x" * 255,
    "漢".encode() * 85,  # 255 bytes
    "é".encode() * 127 + b"x",
    b"caf\xe9.jsonl",
    b"\n.jsonl",
]


def test_case_24_names_are_bytes(shared: Mount, folder: pathlib.Path) -> None:
    place = os.fsencode(folder)
    for name in STRANGE:
        with open(os.path.join(place, name), "wb") as file:
            file.write(b"content of " + name)
    for name in (b"y" * 256, "漢".encode() * 86):
        for action in (os.mkdir, os.stat, os.unlink, os.listdir):
            failed = errno_of(lambda action=action, name=name: action(os.path.join(place, name)))  # type: ignore[misc] # called at once
            assert failed == errno.ENAMETOOLONG
        assert errno_of(lambda name=name: os.rename(os.path.join(place, b"-rf"), os.path.join(place, name))) == (  # type: ignore[misc] # called at once
            errno.ENAMETOOLONG
        )

    def content() -> dict[bytes, bytes]:
        return {name: pathlib.Path(os.fsdecode(os.path.join(place, name))).read_bytes() for name in os.listdir(place)}

    expected = {name: b"content of " + name for name in STRANGE}
    assert content() == expected
    shared.remount()
    assert content() == expected
    listed = {each["path"] for each in shared.journals() if each["path"].startswith(folder.name)}
    assert {os.fsencode(path).rpartition(b"/")[2] for path in listed} == {b"caf\xe9.jsonl", b"\n.jsonl"}


def test_case_25_free_space_is_that_of_the_disk(shared: Mount, folder: pathlib.Path) -> None:
    found, disk = os.statvfs(folder), os.statvfs(shared.state)
    assert found.f_namemax == 255
    assert found.f_blocks * found.f_frsize == disk.f_blocks * disk.f_frsize
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    reserved_and_drift = 1 << 30
    assert abs(found.f_bfree * found.f_frsize - disk.f_bfree * disk.f_frsize) < reserved_and_drift
    assert 0 < found.f_ffree <= found.f_files
    usage = shutil.disk_usage(folder)
    assert 0 < usage.free < usage.total
    for option in ("-P", "-Pi"):
        total, _, available = map(int, run(["df", option, folder]).splitlines()[1].split()[1:4])
        assert 0 < available <= total


def test_case_26_watchers_hear_of_changes(folder: pathlib.Path) -> None:
    """inotify for changes through the mount, which are all that there are: the kernel makes them itself."""
    watched, aside = folder / "watched", folder / "aside"
    watched.mkdir()
    aside.mkdir()
    fd = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, os.fsencode(watched), 0xFFF) > 0

    def heard() -> list[tuple[str, str]]:
        names = {0x2: "modify", 0x4: "attrib", 0x40: "from", 0x80: "to", 0x100: "create", 0x200: "delete"}
        data, events = os.read(fd, 65536), []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            if (kind := names.get(mask & ~0x40000000)) is not None:  # without IN_ISDIR
                events.append((kind, data[16 : 16 + length].rstrip(b"\0").decode()))
            data = data[16 + length :]
        return events

    path = watched / "a.jsonl"
    path.write_bytes(b"x")
    together(lambda: path.write_bytes(b"xy"))  # another process
    assert heard().count(("modify", "a.jsonl")) >= 2
    os.chmod(path, 0o600)
    os.rename(path, watched / "b")
    os.rename(watched / "b", aside / "b")
    (watched / "a.jsonl.lock").mkdir()
    (watched / "a.jsonl.lock").rmdir()
    os.close(os.open(watched / "c", os.O_CREAT))
    (watched / "c").unlink()
    assert heard() == [
        *[("attrib", "a.jsonl"), ("from", "a.jsonl"), ("to", "b"), ("from", "b")],
        *[("create", "a.jsonl.lock"), ("delete", "a.jsonl.lock"), ("create", "c"), ("delete", "c")],
    ]
    os.close(fd)


KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16


@pytest.mark.parametrize("suffix", ["", ".jsonl"], ids=["work", "journal"])
def test_case_27_what_is_not_offered_fails_in_the_way_that_programs_know(folder: pathlib.Path, suffix: str) -> None:
    assert errno_of(lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)) == errno.EOPNOTSUPP
    path = folder / f"f{suffix}"
    path.write_bytes(b"content")
    with open(path, "r+b", buffering=0) as file:
        for mode in (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE):
            failed = libc_errno(libc.fallocate64, file.fileno(), mode, ctypes.c_int64(0), ctypes.c_int64(4096))
            assert failed == errno.EOPNOTSUPP
        assert path.read_bytes() == b"content"
        os.posix_fallocate(file.fileno(), 0, 20_000)
        assert path.read_bytes() == b"content" + bytes(19_993)
        ficlone = 0x40049409
        with open(folder / f"clone{suffix}", "wb") as clone:
            failed = errno_of(lambda: fcntl.ioctl(clone.fileno(), ficlone, file.fileno()))
            assert failed in (errno.EOPNOTSUPP, errno.ENOTTY)
        assert errno_of(lambda: fcntl.ioctl(file.fileno(), 0x5401, bytes(64))) == errno.ENOTTY


def test_case_28_opened_and_removed_things_leave_nothing_behind(
    shared: Mount, folder: pathlib.Path, full: bool
) -> None:
    """The daemon's descriptors and memory, before and after; the live files too."""
    process = pathlib.Path(f"/proc/{shared.pid}")

    def turn(rounds: int) -> None:
        for _ in range(rounds):
            os.mkdir("d")
            fd = os.open("d", os.O_RDONLY | os.O_DIRECTORY)
            os.rmdir("d")
            os.close(fd)
            for name in ("f", "f.jsonl"):
                fd = os.open(name, os.O_RDWR | os.O_CREAT)
                os.unlink(name)
                os.write(fd, b"x")
                os.close(fd)

    def resident() -> int:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def live_files() -> int:
        return sum(len(names) for _, _, names in os.walk(shared.state / "live"))

    with contextlib.chdir(folder):
        turn(300)
        descriptors, memory, files = len(os.listdir(process / "fd")), resident(), live_files()
        turn(20_000 if full else 700)
    wait_until(lambda: len(os.listdir(process / "fd")) <= descriptors + 3, "the end of the last descriptors")
    wait_until(lambda: live_files() <= files, "the end of the last live files")
    assert resident() - memory < 8 << 20


@as_root
def test_case_35_shells_and_bind_mounts_after_a_killed_daemon(
    shared: Mount, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """What recovers: paths, and `cd .` in a shell, which goes by path. What does not: descriptors and bind mounts,
    which say ENOTCONN until they are made again. Nothing is stacked."""
    (folder / "f").write_bytes(b"content")
    run(["sync", folder / "f"])
    bound = tmp_path / "bound"
    bound.mkdir()
    run(["mount", "--bind", folder, bound])
    shell = subprocess.Popen(["sh"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    held = os.open(folder / "f", os.O_RDONLY)

    def tell(command: str) -> str:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{command} 2>/dev/null || echo failed\n")
        shell.stdin.flush()
        return shell.stdout.readline().strip()

    try:
        assert tell("cat f && echo") == "content"
        pid = shared.pid
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        assert tell("cat ./f") == "failed"
        shared.start()  # clears the dead mount itself
        assert (folder / "f").read_bytes() == b"content"
        assert tell("cd . && cat f && echo") == "content"
        assert errno_of(lambda: os.fsync(held)) == errno.ENOTCONN
        assert errno_of(lambda: (bound / "f").stat()) == errno.ENOTCONN
        mounted = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        assert [line.split()[4] for line in mounted].count(str(shared.path)) == 1
        run(["umount", bound])
        run(["mount", "--bind", folder, bound])
        assert (bound / "f").read_bytes() == b"content"
        assert deltapool("umount", shared.path, check=False).returncode == 1  # the shell works in it again
        assert is_mounted(shared.path)
    finally:
        os.close(held)
        shell.communicate("exit\n")
        subprocess.run(["umount", "-l", bound], check=False, capture_output=True)
