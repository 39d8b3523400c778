"""The daemon is killed, the machine goes on. Everything acknowledged to a file in place is there, and names are all or
nothing.

The kill comes at a random instant of a load, or at a step of the daemon chosen by chance; during the recovery from an
earlier one; during an unmount; right after one. `--crash-rounds N` says how many kills, `--seed` which. What SIGTERM
does is no crash: it is held against the same words. The power going is another matter (`test_power`).
"""

import contextlib
import errno
import itertools
import os
import pathlib
import random
import shutil
import signal
import stat
from collections.abc import Callable, Iterator

import pytest
from crashing import HURRIED, Load, some_step
from faults import Fault, FaultyMount
from mounting import deltapool, is_mounted, wait_until
from processes import Counter, Flag, errno_of, running
from promises import Found
from trees import seen

from deltapool.fs import control

pytestmark = pytest.mark.crash

KEPT = 3  # loads of earlier rounds that stay in the volume
GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
MANY = 40  # files: more than are made durable one by one

RECOVERY = (
    "deltapool.fs.livefile:LiveStore.remove",
    "deltapool.fs.livefile:LiveStore.sync_all",
    "deltapool.fs.recover:_recover_file",
    "deltapool.fs.namespace:Namespace.note_journal",
    "deltapool.fs.namespace:Namespace.touch",
    "deltapool.fs.namespace:Namespace.close_graves",
    "deltapool.fs.namespace:Namespace.skip_numbers",
    "deltapool.fs.database:Database.commit",
)
UNMOUNT = (
    "deltapool.fs.settle:Settler.flush",
    "deltapool.fs.settle:Settler.reap",
    "deltapool.fs.livefile:LiveStore.sync_all",
    "deltapool.fs.livefile:LiveStore.promote",
    "deltapool.fs.namespace:Namespace.clear_dirty",
    "deltapool.fs.namespace:Namespace.set_meta",
    "deltapool.fs.database:Database.commit",
    "deltapool.fs.database:Database.durable",
    "deltapool.fs.database:Database.close",
)


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[FaultyMount]:
    """Not started yet."""
    mount = FaultyMount(tmp_path / "mount", tmp_path / "state")
    try:
        yield mount
    finally:
        mount.clear()


@pytest.mark.timeout(3600)
def test_what_was_promised_is_there_after_a_kill_at_any_instant(
    daemon: FaultyMount, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    kept: list[tuple[Load, list[Found]]] = []
    armed = tmp_path / "armed"
    for number in range(request.config.getoption("--crash-rounds")):
        name = f"{request.config.getoption('--seed')} kill {number}"
        chance = random.Random(name)
        daemon.faults = (some_step(chance, "die", armed),)
        daemon.config = chance.choice((None, HURRIED))
        if number == 0:
            daemon.start()
        else:
            after_the_kill(daemon, tmp_path, name)
        if kept:
            kept[-1] = kept[-1][0], kept[-1][0].judge(daemon.path, killed=True)
        for earlier, found in kept:
            assert earlier.found(daemon.path) == found, f"{name}: what a kill had left changed later"
        while len(kept) > KEPT:
            remove(daemon.path, kept.pop(0)[0])
        load = Load(tmp_path, [f"{name} {worker}" for worker in range(3)])
        kept.append((load, []))
        kill_under_load(daemon, load, chance, armed)
        if chance.random() < 0.3:  # and once more, during recovery
            daemon.faults = (Fault(chance.choice(RECOVERY), "die", nth=chance.randrange(1, 4)),)
            daemon.start()
            daemon.kill()
    daemon.faults = ()
    after_the_kill(daemon, tmp_path, "the last")
    kept[-1][0].judge(daemon.path, killed=True)
    for earlier, found in kept[:-1]:
        assert earlier.found(daemon.path) == found, "what a kill had left changed later"
    daemon.stop()
    assert daemon.fsck() == []


def kill_under_load(daemon: FaultyMount, load: Load, chance: random.Random, armed: pathlib.Path) -> None:
    try:
        load.start(daemon)
        if chance.random() < 0.5:
            load.wait(chance.randrange(200))
            armed.touch()  # it dies at its step
        load.wait(chance.randrange(20, 800))
        daemon.kill()
        load.end()
    finally:
        load.clear()
        armed.unlink(missing_ok=True)


def after_the_kill(daemon: FaultyMount, folder: pathlib.Path, name: str) -> None:
    """Mounts what a kill left. fsck has nothing to say before or after, and rescue finds the tree that is mounted."""
    rescued = folder / "rescued"
    assert daemon.fsck() == [], f"{name}: before recovery"
    daemon.rescue(rescued)
    daemon.start()
    there, mounted = seen(rescued), seen(daemon.path)
    differing = {
        path: (there.get(path), mounted.get(path))
        for path in there.keys() | mounted.keys()
        if there.get(path) != mounted.get(path)
    }
    assert not differing, f"{name}: (rescued, mounted) {differing}"
    assert daemon.fsck() == [], f"{name}: after recovery"
    assert "Traceback" not in daemon.log(), daemon.log()
    shutil.rmtree(rescued)


def remove(path: pathlib.Path, load: Load) -> None:
    for number in range(len(load.seeds)):
        shutil.rmtree(path / load.root(number), ignore_errors=True)  # a load may not have come to making its folder


def append(path: pathlib.Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def sync(path: pathlib.Path) -> None:
    """Of a folder: its names are durable, and all that were acknowledged before."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Scene:
    """Some of everything that an end finds: in place and not yet, with a name and without."""

    OLD, NEW = b"old " * 20_000, b"new " * 30_000
    LINES = b'{"n": 1}\n' * 1000

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def make(self) -> None:
        self.path.mkdir(exist_ok=True)
        for name in ("rewritten", "target", "removed"):
            (self.path / name).write_bytes(self.OLD)
        for name in ("appended.jsonl", "folded.jsonl"):
            (self.path / name).write_bytes(self.LINES)
        for number in range(MANY):
            (self.path / f"file{number}").touch()
        sync(self.path)
        for number in range(MANY):
            append(self.path / f"file{number}", b"%d" % number * 1000)
        append(self.path / "appended.jsonl", self.LINES)
        (self.path / "folded.jsonl").write_bytes(self.LINES + self.LINES)
        (self.path / "rewritten").write_bytes(self.NEW)
        (self.path / "temporary").write_bytes(self.NEW)
        (self.path / "temporary").rename(self.path / "target")
        (self.path / "removed").unlink()
        sync(self.path)

    def check(self, *, clean: bool) -> None:
        """`clean`: a killed daemon may have the old content for the new one, a stopped one not."""
        either = (self.NEW,) if clean else (self.OLD, self.NEW)
        for number in range(MANY):
            assert (self.path / f"file{number}").read_bytes() == b"%d" % number * 1000, number
        assert (self.path / "appended.jsonl").read_bytes() == self.LINES + self.LINES
        folded = (self.path / "folded.jsonl").read_bytes()
        assert folded == (self.LINES + self.LINES)[: len(folded)]
        assert len(folded) >= len(self.LINES) * (2 if clean else 1)
        assert (self.path / "rewritten").read_bytes() in either
        assert (self.path / "target").read_bytes() == self.NEW
        assert not (self.path / "removed").exists()
        assert not (self.path / "temporary").exists()


def test_a_kill_at_any_step_of_recovery_changes_nothing(daemon: FaultyMount, tmp_path: pathlib.Path) -> None:
    daemon.faults = (Fault("deltapool.fs.settle:Settler.reap", "wait", seconds=600),)  # graves stay
    daemon.start()
    scene = Scene(daemon.path)
    scene.make()
    control.call(daemon.state, "journals", 60)  # which notes them, and leaves them dirty
    with open(daemon.path / "rewritten", "wb", buffering=0) as unfinished:
        unfinished.write(b"half of the newest")
        daemon.kill()
    daemon.rescue(tmp_path / "first")
    for step in RECOVERY:  # its one commit comes last: until then all that there is to do stays
        for when in ("before", "after"):
            daemon.faults = (Fault(step, "die", when),)
            daemon.start()
            assert daemon.ended, f"it did not come to {step}"
            daemon.kill()
            assert daemon.fsck() == [], (step, when)
    daemon.faults = ()
    after_the_kill(daemon, tmp_path, "a kill at each step")
    scene.check(clean=False)
    assert seen(tmp_path / "first") == seen(daemon.path)


def test_a_kill_at_any_step_of_umount_loses_nothing(daemon: FaultyMount, tmp_path: pathlib.Path) -> None:
    armed = tmp_path / "armed"
    daemon.start()
    daemon.stop()
    scene = None
    for step, when in itertools.product(UNMOUNT, ("before", "after")):
        daemon.faults = (Fault(step, "die", when, armed_by=str(armed)),)
        name = f"{when} {step.rpartition('.')[2]}"
        after_the_kill(daemon, tmp_path, f"the kill before that {name}")
        if scene is not None:
            scene.check(clean=False)
            shutil.rmtree(scene.path)
        scene = Scene(daemon.path / name)
        scene.make()
        armed.touch()
        assert daemon.unmount() == -signal.SIGKILL, name
        daemon.kill()
        armed.unlink()
    daemon.faults = ()
    after_the_kill(daemon, tmp_path, "the last kill")
    assert scene is not None
    scene.check(clean=False)


def test_everything_is_there_after_a_kill_when_umount_returned(daemon: FaultyMount, tmp_path: pathlib.Path) -> None:
    """Also if the daemon takes its time for the last of it."""
    armed = tmp_path / "armed"
    wait = Fault("deltapool.fs.settle:Settler.flush", "wait", armed_by=str(armed), seconds=2)
    daemon.faults = (wait,)
    daemon.start()
    scene = Scene(daemon.path)
    scene.make()
    armed.touch()
    deltapool("umount", daemon.path)
    daemon.kill()
    daemon.faults = ()
    after_the_kill(daemon, tmp_path, "umount")
    assert daemon.status()["recovery"]["clean"]
    scene.check(clean=True)


def test_sigterm_of_an_idle_mount_is_a_clean_unmount(daemon: FaultyMount, tmp_path: pathlib.Path) -> None:
    daemon.start()
    scene = Scene(daemon.path)
    scene.make()
    append(daemon.path / "never synced.jsonl", b"{}\n")
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.reap() == 0
    assert not is_mounted(daemon.path)
    after_the_kill(daemon, tmp_path, "SIGTERM")
    assert daemon.status()["recovery"]["clean"]
    scene.check(clean=True)
    assert (daemon.path / "never synced.jsonl").read_bytes() == b"{}\n"


def test_sigterm_of_a_busy_mount_serves_its_users_until_they_let_go(
    daemon: FaultyMount, tmp_path: pathlib.Path
) -> None:
    daemon.start()
    path, counter, enough = daemon.path / "busy.jsonl", Counter(), Flag()

    def write() -> None:
        with open(path, "ab", buffering=0) as file, open(daemon.path / "rewritten", "wb", buffering=0) as rewritten:
            while not enough:
                assert file.write(b'{"n": %d}\n' % counter.value) > 0
                rewritten.write(b"%d," % counter.value)
                counter.add()

    with running(write) as (writer,):
        wait_until(lambda: counter.value > 20, "the first lines")
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: not is_mounted(daemon.path), "the end of the mount")
        before = counter.value
        wait_until(lambda: counter.value > before + 20, "lines after the end of the mount")
        assert not daemon.ended
        enough.set()
        writer.wait()
    assert daemon.reap() == 0
    after_the_kill(daemon, tmp_path, "SIGTERM")
    assert daemon.status()["recovery"]["clean"]
    assert path.read_bytes() == b"".join(b'{"n": %d}\n' % n for n in range(counter.value))
    assert (daemon.path / "rewritten").read_bytes() == b"".join(b"%d," % n for n in range(counter.value))


@pytest.mark.slow
def test_sigterm_ends_a_mount_whose_users_never_let_go(daemon: FaultyMount, tmp_path: pathlib.Path) -> None:
    daemon.start()
    path = daemon.path / "held.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: not is_mounted(daemon.path), "the end of the mount")
        os.write(fd, b"{}\n")
        assert daemon.reap() == 0
        assert errno_of(lambda: os.write(fd, b"{}\n")) in GONE
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    after_the_kill(daemon, tmp_path, "SIGTERM")
    assert daemon.status()["recovery"]["clean"]
    assert path.read_bytes() == b"{}\n"


def survivor(folder: pathlib.Path, name: str, counter: Counter, back: Flag) -> dict[str, int]:
    """Writes until the mount is gone, tries its descriptors before and after the next one came, then goes on by name.
    The errno of everything it tried."""
    path = folder / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    os.fsync(fd)  # a name of the last 10 ms may go with the daemon, and 100 writes can be quicker than that
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    tries: dict[str, Callable[[], object]] = {
        "write": lambda: os.write(fd, b"lost"),
        "pread": lambda: os.pread(fd, 10, 1 << 30),
        "fsync": lambda: os.fsync(fd),
        "ftruncate": lambda: os.ftruncate(fd, 0),
        "fchmod": lambda: os.fchmod(fd, 0o600),
        "openat": lambda: os.open("new", os.O_RDWR | os.O_CREAT, dir_fd=directory),
        "listdir": lambda: os.listdir(directory),
    }
    errors = {}
    try:
        while True:
            os.write(fd, b'{"n": %d}\n' % counter.value)
            counter.add()
    except OSError as error:
        errors["the write that met the kill"] = error.errno or 0
    errors |= {f"{what} while it is gone": errno_of(how) for what, how in tries.items()}
    wait_until(lambda: bool(back), "the next mount")
    errors |= {f"{what} on the old descriptor": errno_of(how) for what, how in tries.items()}
    for each in (fd, directory):
        with contextlib.suppress(OSError):
            os.close(each)
    append(path, b'{"back": 1}\n')
    return errors


@pytest.mark.parametrize("name", ["held.jsonl", "held.txt"])
def test_who_writes_through_a_kill_is_told_and_goes_on_by_name(
    daemon: FaultyMount, tmp_path: pathlib.Path, name: str
) -> None:
    daemon.start()
    counters, back = [Counter() for _ in range(3)], Flag()
    folders = [daemon.path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()

    def process(number: int) -> Callable[[], dict[str, int]]:
        return lambda: survivor(folders[number], name, counters[number], back)

    with running(*(process(number) for number in range(3))) as children:
        wait_until(lambda: all(counter.value > 100 for counter in counters), "some lines of each")
        daemon.kill()
        after_the_kill(daemon, tmp_path, "a kill under writers")
        back.set()
        told = [child.wait(60) for child in children]
    for errors in told:
        assert all(number in GONE for number in errors.values()), errors
    for folder, counter in zip(folders, counters, strict=True):
        lines = [b'{"n": %d}\n' % number for number in range(counter.value + 1)]  # the last may have arrived
        content = (folder / name).read_bytes()
        assert content in [b"".join(each) + b'{"back": 1}\n' for each in (lines[:-1], lines)]
        assert os.listdir(folder) == [name]
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o644
    assert daemon.fsck() == []
