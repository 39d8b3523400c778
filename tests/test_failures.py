"""What fails below us and in us: disks that refuse, handlers that raise. See test_clients.py for what fails around us.

A disk that does not keep its word makes the mount read-only. A handler that fails costs one request an error.
"""

import contextlib
import errno
import itertools
import os
import pathlib
import resource
from collections.abc import Callable, Iterator

import pytest
from faults import Fault, FaultyMount
from mounting import wait_until
from processes import errno_of

DURABLE = b"durable " * 5000


class Refusing(FaultyMount):
    """Its disk begins to refuse when it is told to."""

    def __init__(self, folder: pathlib.Path, config: str | None, *faults: Fault) -> None:
        self.armed = folder / "armed"
        super().__init__(folder / "mount", folder / "state", config, *faults)


@pytest.fixture
def made(tmp_path: pathlib.Path) -> Iterator[Callable[..., Refusing]]:
    """Makes a mount with faults, which strike while the file `armed` is there."""
    with contextlib.ExitStack() as stack:

        def make(*faults: tuple[str, str], config: str | None = None, value: object = None) -> Refusing:
            armed = str(tmp_path / "armed")
            all_faults = [Fault(function, then, armed_by=armed, value=value) for function, then in faults]
            mount = Refusing(tmp_path, config, *all_faults)
            stack.callback(mount.clear)
            mount.start()
            return mount

        yield make


# --- a disk that does not keep its word


def fsync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append(path: pathlib.Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def keep_something(mount: FaultyMount) -> None:
    for name in ("work", "journal.jsonl"):
        (mount.path / name).write_bytes(DURABLE)
        fsync(mount.path / name)


def expect_read_only(mount: FaultyMount, said: str) -> None:
    """Everything that changes is refused, everything that reads goes on, and the status tells why."""
    assert said in (mount.status()["read_only"] or "")
    work, journal = mount.path / "work", mount.path / "journal.jsonl"
    changes: list[Callable[[], object]] = [
        lambda: work.write_bytes(b"new"),
        lambda: os.truncate(work, 5),
        lambda: append(journal, b"x"),
        lambda: (mount.path / "a new name").write_bytes(b"x"),
        lambda: (mount.path / "another directory").mkdir(),
        lambda: work.rename(mount.path / "renamed"),
        lambda: journal.unlink(),
        lambda: os.link(work, mount.path / "linked"),
        lambda: work.chmod(0o600),
        lambda: os.setxattr(work, "user.a", b"b"),
    ]
    assert [errno_of(change) for change in changes] == [errno.EROFS] * len(changes)
    assert work.read_bytes() == DURABLE
    assert journal.read_bytes()[: len(DURABLE)] == DURABLE
    assert {"work", "journal.jsonl"} <= set(os.listdir(mount.path))


def expect_an_end_and_what_was_durable(mount: Refusing) -> None:
    """It says that it could not end clean, and the next mount, on a disk that works again, has what was promised."""
    assert mount.unmount() == 1
    assert "closed after a failure" in mount.log()
    mount.armed.unlink(missing_ok=True)
    mount.start()
    assert mount.status()["read_only"] is None
    assert mount.status()["recovery"]["clean"] is False
    assert (mount.path / "work").read_bytes() == DURABLE
    assert (mount.path / "journal.jsonl").read_bytes()[: len(DURABLE)] == DURABLE
    (mount.path / "again").write_bytes(b"writable again")
    fsync(mount.path / "again")
    wait_until(lambda: mount.status()["audit"]["done"], "the end of the audit")
    assert mount.fsck() == []
    mount.stop()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("deltapool.fs.livefile:LiveStore.sync_data", "other"),
        ("deltapool.fs.livefile:LiveStore.sync_data", "journal.jsonl"),
        ("deltapool.fs.livefile:LiveStore.sync_folder", "other"),
        ("os:fdatasync", "other"),
        ("os:fdatasync", ""),  # a directory: only the namespace's log is synced
    ],
)
def test_an_fsync_that_fails_is_told_and_makes_the_mount_read_only(
    made: Callable[..., Refusing], function: str, name: str
) -> None:
    mount = made((function, "raise"))
    keep_something(mount)
    mount.armed.touch()
    with open(mount.path / (name or "other"), "ab") as file:
        file.write(b"appended")
    assert errno_of(lambda: fsync(mount.path / name)) in (errno.EIO, errno.EROFS)
    expect_read_only(mount, "could not be made durable")
    assert errno_of(lambda: fsync(mount.path / name)) != 0, "a second fsync does not make it good"
    expect_an_end_and_what_was_durable(mount)


@pytest.mark.parametrize(
    ("function", "name"),
    [("os:fsync", "other"), ("os:fdatasync", "journal.jsonl"), ("deltapool.fs.livefile:LiveStore.promote", "work")],
)
def test_a_failure_in_the_background_makes_the_mount_read_only(
    made: Callable[..., Refusing], function: str, name: str
) -> None:
    mount = made((function, "raise"), config="[limits]\nsettle_seconds = 0.1\nnote_seconds = 0.1\n")
    keep_something(mount)
    mount.armed.touch()
    with open(mount.path / name, "wb" if name == "work" else "ab") as file:
        file.write(DURABLE)
    wait_until(lambda: mount.status()["read_only"] is not None, "a failure")
    expect_read_only(mount, "could not be made durable")
    expect_an_end_and_what_was_durable(mount)


def test_a_failure_during_the_unmount_is_told(made: Callable[..., Refusing]) -> None:
    mount = made(("os:fsync", "raise"), ("os:fdatasync", "raise"), config="[limits]\nsettle_seconds = 600\n")
    keep_something(mount)
    (mount.path / "other").write_bytes(b"never synced")
    mount.armed.touch()
    expect_an_end_and_what_was_durable(mount)


@pytest.mark.parametrize("by_fsync", [True, False])
def test_a_commit_that_fails_makes_the_mount_read_only(made: Callable[..., Refusing], by_fsync: bool) -> None:
    """A real one: the daemon may not write files any further than 4 KiB, so SQLite cannot write its log."""
    mount = made(config="[limits]\ncommit_delay_seconds = 600\nsettle_seconds = 600\n" if by_fsync else None)
    keep_something(mount)
    (mount.path / "directory").mkdir()
    fsync(mount.path / "directory")
    (mount.path / "uncommitted").symlink_to("anything")
    unlimited = resource.prlimit(mount.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(mount.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    if by_fsync:
        assert errno_of(lambda: fsync(mount.path)) in (errno.EIO, errno.EROFS)
    else:
        assert errno_of(lambda: (mount.path / "another").symlink_to("anything")) in (0, errno.EROFS)
        wait_until(lambda: mount.status()["read_only"] is not None, "a failed COMMIT")
    expect_read_only(mount, "COMMIT")
    resource.prlimit(mount.pid, resource.RLIMIT_FSIZE, unlimited)
    expect_read_only(mount, "COMMIT")
    expect_an_end_and_what_was_durable(mount)
    mount.start()
    assert (mount.path / "directory").is_dir()


# --- a handler that fails


def _open_and(work: Callable[[int], object], flags: int = os.O_RDWR) -> Callable[[], object]:
    def run() -> object:
        fd = os.open("file", flags)
        try:
            return work(fd)
        finally:
            os.close(fd)

    return run


HANDLERS: dict[str, Callable[[], object]] = {
    "deltapool.fs.files:Files.read": _open_and(lambda fd: os.pread(fd, 100, 0)),
    "deltapool.fs.files:Files.write": _open_and(lambda fd: os.pwrite(fd, b"x", 0)),
    "deltapool.fs.files:Files.sync": _open_and(os.fsync),
    "deltapool.fs.files:Files.open": _open_and(lambda fd: fd),
    "deltapool.fs.files:Files.truncate": lambda: os.truncate("file", 0),
    "deltapool.fs.names:Names.lookup": lambda: os.stat("never looked up"),
    "deltapool.fs.names:Names.create": lambda: os.mkdir("new"),
    "deltapool.fs.names:Names.link": lambda: os.link("file", "linked"),
    "deltapool.fs.names:Names.unlink": lambda: os.unlink("file"),
    "deltapool.fs.names:Names.rmdir": lambda: os.rmdir("directory"),
    "deltapool.fs.names:Names.rename": lambda: os.rename("file", "renamed"),
    "deltapool.fs.names:Names.entries": lambda: os.listdir("directory"),
    "deltapool.fs.attributes:Attributes.change": lambda: os.chmod("file", 0o600),
    "deltapool.fs.attributes:Attributes.get_xattr": lambda: os.getxattr("file", "user.a"),
    "deltapool.fs.attributes:Attributes.set_xattr": lambda: os.setxattr("file", "user.a", b"b"),
    "deltapool.fs.attributes:Attributes.list_xattrs": lambda: os.listxattr("file"),
    "deltapool.fs.attributes:Attributes.statvfs": lambda: os.statvfs("."),
    "deltapool.fs.namespace:Namespace.symlink": lambda: os.readlink("symlink"),
}
WITHOUT_CALLER = ("deltapool.fs.files:Files.release", "deltapool.fs.inodes:Inodes.forget")
WRONG = {  # what they give is of a wrong type, which pyfuse3 would meet outside of our reach
    "deltapool.fs.files:Files.read": 7,
    "deltapool.fs.files:Files.write": "seven",
    "deltapool.fs.names:Names.create": 7,
    "deltapool.fs.attributes:Attributes.get_xattr": 7,
    "deltapool.fs.attributes:Attributes.list_xattrs": ["text"],
    "deltapool.fs.attributes:Attributes.statvfs": None,
    "deltapool.fs.namespace:Namespace.symlink": 7,
}


class Broken:
    """One mount in which every handler can be made to fail, one at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.places = itertools.count()
        faults = [Fault(each, "fail", armed_by=self.arm(each, "fail")) for each in (*HANDLERS, *WITHOUT_CALLER)]
        faults += [Fault(each, "give", armed_by=self.arm(each, "give"), value=value) for each, value in WRONG.items()]
        self.mount = FaultyMount(folder / "mount", folder / "state", None, *faults)

    def arm(self, function: str, then: str) -> str:
        return str(self.folder / f"{function} {then}")

    @contextlib.contextmanager
    def armed(self, function: str, then: str) -> Iterator[None]:
        path = pathlib.Path(self.arm(function, then))
        path.touch()
        try:
            yield
        finally:
            path.unlink()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    made = Broken(tmp_path_factory.mktemp("broken"))
    try:
        made.mount.start()
        yield made
    finally:
        made.mount.clear()


@pytest.fixture
def place(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder in the broken mount with something of each kind, which is where the test works."""
    path = broken.mount.path / f"place{next(broken.places)}"
    path.mkdir()
    with monkeypatch.context() as here:
        here.chdir(path)
        (path / "file").write_bytes(b"content of the file\n" * 100)
        (path / "directory").mkdir()
        (path / "symlink").symlink_to("file")
        os.setxattr("file", "user.a", b"value")
        yield path


@pytest.mark.parametrize(
    ("function", "then"), [(each, "fail") for each in HANDLERS] + [(each, "give") for each in WRONG]
)
def test_a_handler_that_fails_is_eio_for_its_caller_and_a_traceback_in_the_log(
    broken: Broken, place: pathlib.Path, function: str, then: str
) -> None:
    said, errors = len(broken.mount.log()), broken.mount.status()["fuse"]["handler_errors"]
    with broken.armed(function, then):
        assert errno_of(HANDLERS[function]) == errno.EIO
    assert broken.mount.status()["fuse"]["handler_errors"] > errors
    assert "Traceback" in broken.mount.log()[said:]
    if then == "fail":
        assert f"RuntimeError: an injected failure of {function}" in broken.mount.log()[said:]
    broken_no_more(broken.mount, place)


@pytest.mark.parametrize("function", WITHOUT_CALLER)
def test_a_failure_that_has_no_caller_is_in_the_log(broken: Broken, place: pathlib.Path, function: str) -> None:
    said = len(broken.mount.log())
    with broken.armed(function, "fail"):
        (place / "short-lived").write_bytes(b"x")
        (place / "short-lived").unlink()
        wait_until(lambda: "an injected failure" in broken.mount.log()[said:], "a traceback")
    assert "Traceback" in broken.mount.log()[said:]
    broken_no_more(broken.mount, place)


def broken_no_more(mount: FaultyMount, place: pathlib.Path) -> None:
    """Everything goes on as if nothing had been."""
    assert mount.status()["read_only"] is None
    (place / "after").write_bytes(b"after")
    fsync(place / "after")
    assert (place / "after").read_bytes() == b"after"
    (place / "after").rename(place / "afterwards")
    assert "afterwards" in os.listdir(place)
