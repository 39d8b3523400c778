"""Random operations in a mount and in a plain directory beside it: results, errors, and all that can be seen afterwards
are the same; across remounts, and across kill -9 after a flush.

`--model-rounds N` is how many runs are made, `--seed` which ones. A failure is shrunk, and printed as the calls of a
regression test.
"""

import errno
import os
import pathlib
import shutil
import stat
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import model
import pytest
from conftest import ALL_JOURNALS
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Pair, Side, exact_clock
from mounting import Mount

from deltapool.fs import control

STEPS = 200
COMPARE_EVERY = 10
LIVED = 60  # steps, so that there is something to be kept
LINE = 160

FOLDERS = (b"", b"d/", b"d/e/", b"k.jsonl/")
NAMES = (b"a", b"b.jsonl", b"c.jsonl", b"b.jsonl.lock", b"n\xe9\xff.jsonl", b"new\nline", b"d", b"e", b"k.jsonl")
anywhere = st.builds(lambda folder, name: folder + name, st.sampled_from(FOLDERS), st.sampled_from(NAMES))
MEETING = (b"a", b"b.jsonl", b"d/b.jsonl")  # most operations meet what others have left there
meeting = st.sampled_from(MEETING)
paths = st.one_of(meeting, meeting, anywhere)
links = st.sampled_from((b"a", b"b.jsonl", b"../a", b"d", b"e/b.jsonl", b"nowhere", b"k.jsonl", b"." * 300))
slots = st.integers(0, 3)
sizes = st.one_of(st.integers(0, 100), st.sampled_from((4095, 4096, 4097, 8193, 70_000, 1 << 20, (1 << 20) + 1)))
offsets = st.one_of(st.just(0), sizes)
accesses = st.sampled_from((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))
extras = st.sets(
    st.sampled_from((os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_NOFOLLOW, os.O_DSYNC)),
    max_size=3,
)
modes = st.sampled_from((0o644, 0o600, 0o755, 0o400, 0, 0o1777))
owners = st.sampled_from((-1, 0, 1000, 65534))
times = st.one_of(st.none(), st.sampled_from(model.PAST))
xattrs = st.sampled_from(("user.a", "user.b.jsonl", "user.\udce9\n", "user.", "user." + "x" * 251))
values = st.one_of(st.binary(max_size=20), st.just(b"v" * 200))
seeds = st.sampled_from((0, 0, 0, 1, 2))

# Every byte depends on its place and on the seed: whoever writes with the same seed again writes the same bytes.
STREAMS = [b"".join(b'{"%d":%d}\n' % (seed, n) for n in range(1 << 17)) for seed in range(3)]


def stream(seed: int, offset: int, size: int) -> bytes:
    start = offset % (1 << 18)
    return (STREAMS[seed][start:] + STREAMS[seed])[:size]


class Operations(RuleBasedStateMachine):
    """Each run has a folder of its own on both sides, and one restart: a mount takes as long as many steps."""

    mounted: ClassVar[Mount]
    plain: ClassVar[pathlib.Path]
    exact: ClassVar[bool]
    runs: ClassVar[Iterator[int]]

    def __init__(self) -> None:
        super().__init__()
        name = f"run{next(self.runs)}"
        self.folders = self.mounted.path / name, self.plain / name
        for folder in self.folders:
            (folder / "d" / "e").mkdir(parents=True)
            (folder / "k.jsonl").mkdir()
            for number, name in enumerate(MEETING):
                (folder / os.fsdecode(name)).write_bytes(stream(0, 0, 9000 * number))
        self.pair = Pair(*(os.fsencode(folder) for folder in self.folders), exact=self.exact)
        self.restarts: list[str] = []
        self.script: list[str] = []  # what was done, and what came of it

    @initialize(restart=st.sampled_from(("remount", "crash")))
    def plan(self, restart: str) -> None:
        self.restarts = [restart]

    def teardown(self) -> None:
        try:
            self.pair.compare_all()
        finally:
            for side in (self.pair.mounted, self.pair.plain):
                side.close_all()
        for folder in self.folders:
            shutil.rmtree(folder)

    def do(self, act: Any, *names: bytes) -> None:
        """`names` are those that `act` may change. A failure that depends on time is not shrunk: its script helps."""
        caller = sys._getframe(1)
        arguments = (f"{name}={value!r}" for name, value in caller.f_locals.items() if name not in ("self", "act"))
        self.script.append(f"{caller.f_code.co_name}({', '.join(arguments)})"[:LINE])
        try:
            result = self.pair.both(act)
            self.script.append(f"    {result!r}"[:LINE])
            around = {os.path.dirname(name) or b"." for name in names}
            self.pair.compare(*sorted({*names, *around}))
            if len(self.script) % (2 * COMPARE_EVERY) == 0:
                self.pair.compare_all()
        except AssertionError as error:
            error.add_note("\n".join(self.script))
            raise

    def has_slot(self) -> bool:
        return bool(self.pair.plain.slots)

    def pick(self, slot: int) -> int:
        """One of the slots that are open."""
        return sorted(self.pair.plain.slots)[slot % len(self.pair.plain.slots)]

    # --- names

    @rule(slot=slots, name=paths, access=accesses, extra=extras, mode=modes)
    def open_file(self, slot: int, name: bytes, access: int, extra: set[int], mode: int) -> None:
        if os.O_EXCL in extra and os.O_CREAT not in extra:
            extra = extra - {os.O_EXCL}  # undefined
        flags = sum(extra) | access
        self.do(lambda side: side.open(slot, name, flags, mode), name)

    @rule(slot=slots, name=paths)
    def create(self, slot: int, name: bytes) -> None:
        self.do(lambda side: side.open(slot, name, os.O_RDWR | os.O_CREAT, 0o644), name)

    @rule(name=paths, seed=seeds, size=sizes, chunk=st.sampled_from((1 << 20, 4096, 1000)))
    def rewrite(self, name: bytes, seed: int, size: int, chunk: int) -> None:
        """As agents do: O_TRUNC, and all of it in chunks."""
        data = stream(seed, 0, size)

        def act(side: Side) -> None:
            fd = os.open(side.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            try:
                for start in range(0, size, chunk):
                    os.write(fd, data[start : start + chunk])
            finally:
                os.close(fd)

        self.do(act, name)

    @rule(name=meeting, seed=seeds, size=sizes)
    def append(self, name: bytes, seed: int, size: int) -> None:
        def act(side: Side) -> int:
            fd = os.open(side.path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
            try:
                return os.write(fd, stream(seed, os.fstat(fd).st_size, size))
            finally:
                os.close(fd)

        self.do(act, name)

    @rule(name=meeting, seeds_=st.tuples(seeds, seeds), cut=sizes, size=sizes)
    def rewrite_open(self, name: bytes, seeds_: tuple[int, int], cut: int, size: int) -> None:
        """The same on both sides of `cut`, or not; left open, so that what is held back is looked at."""

        def act(side: Side) -> None:
            side.open(0, name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(side.slots[0], stream(seeds_[0], 0, min(cut, size)))
            os.write(side.slots[0], stream(seeds_[1], min(cut, size), max(0, size - cut)))

        self.do(act, name)

    @rule(old=paths, new=paths)
    def rename(self, old: bytes, new: bytes) -> None:
        self.do(lambda side: os.rename(side.path(old), side.path(new)), old, new)

    @rule(old=paths, new=paths, flags=st.integers(0, 3))
    def renameat2(self, old: bytes, new: bytes, flags: int) -> None:
        self.do(lambda side: model.renameat2(side.path(old), side.path(new), flags), old, new)

    @rule(old=paths, new=paths)
    def link(self, old: bytes, new: bytes) -> None:
        self.do(lambda side: os.link(side.path(old), side.path(new), follow_symlinks=False), old, new)

    @precondition(has_slot)
    @rule(slot=slots, new=paths)
    def link_open(self, slot: int, new: bytes) -> None:
        slot = self.pick(slot)
        self.do(lambda side: os.link(f"/proc/self/fd/{side.slots[slot]}".encode(), side.path(new)), new)

    @rule(to=links, name=paths)
    def symlink(self, to: bytes, name: bytes) -> None:
        self.do(lambda side: os.symlink(to, side.path(name)), name)

    @rule(name=paths, folder=st.booleans())
    def remove(self, name: bytes, folder: bool) -> None:
        self.do(lambda side: (os.rmdir if folder else os.unlink)(side.path(name)), name)

    @rule(name=st.one_of(paths, st.sampled_from(FOLDERS)), xattr=xattrs)
    def look(self, name: bytes, xattr: str) -> None:
        """In every way that looks at a name; through links, unlike the comparison."""
        self.do(lambda side: model.Look.of(os.stat(side.path(name))), name)
        self.do(lambda side: side.list(name))
        self.do(lambda side: os.readlink(side.path(name)), name)
        self.do(lambda side: os.getxattr(side.path(name), xattr), name)

    @rule(name=paths, mode=modes)
    def mkdir(self, name: bytes, mode: int) -> None:
        self.do(lambda side: os.mkdir(side.path(name), mode), name)

    @rule(name=paths, kind=st.sampled_from((stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG)), mode=modes)
    def mknod(self, name: bytes, kind: int, mode: int) -> None:
        self.do(lambda side: os.mknod(side.path(name), kind | mode), name)

    # --- attributes

    @rule(name=paths, mode=modes)
    def chmod(self, name: bytes, mode: int) -> None:
        self.do(lambda side: os.chmod(side.path(name), mode), name)

    @rule(name=st.sampled_from((b"d", b"d/e", b"k.jsonl")), mode=st.sampled_from((0o2775, 0o755)))
    def set_group_id(self, name: bytes, mode: int) -> None:
        """Only of directories: what a write does to the bits of a file is tested elsewhere."""

        def act(side: Side) -> None:
            if stat.S_ISDIR(os.lstat(side.path(name)).st_mode):
                os.chmod(side.path(name), mode)

        self.do(act, name)

    @precondition(lambda self: os.geteuid() == 0)
    @rule(name=paths, uid=owners, gid=owners, follow=st.booleans())
    def chown(self, name: bytes, uid: int, gid: int, follow: bool) -> None:
        self.do(lambda side: os.chown(side.path(name), uid, gid, follow_symlinks=follow), name)

    @rule(name=paths, atime=times, mtime=times, follow=st.booleans())
    def utimensat(self, name: bytes, atime: int | None, mtime: int | None, follow: bool) -> None:
        self.do(lambda side: model.utimensat(side.path(name), atime, mtime, follow), name)

    @rule(name=paths)
    def touch(self, name: bytes) -> None:
        self.do(lambda side: os.utime(side.path(name)), name)

    @rule(name=paths, xattr=xattrs, value=values, how=st.sampled_from((0, os.XATTR_CREATE, os.XATTR_REPLACE, None)))
    def change_xattr(self, name: bytes, xattr: str, value: bytes, how: int | None) -> None:
        def act(side: Side) -> None:
            if how is None:
                os.removexattr(side.path(name), xattr)
            else:
                side.set_xattr(side.path(name), xattr, value, how)

        self.do(act, name)

    @rule(name=paths, size=sizes)
    def truncate(self, name: bytes, size: int) -> None:
        self.do(lambda side: os.truncate(side.path(name), size), name)

    # --- what is open, with a name or without

    @precondition(has_slot)
    @rule(slot=slots, offset=offsets, size=sizes)
    def pread(self, slot: int, offset: int, size: int) -> None:
        slot = self.pick(slot)
        self.do(lambda side: os.pread(side.slots[slot], size, offset))

    @precondition(has_slot)
    @rule(slot=slots, size=sizes)
    def read(self, slot: int, size: int) -> None:
        slot = self.pick(slot)
        self.do(lambda side: os.read(side.slots[slot], size))

    @precondition(has_slot)
    @rule(slot=slots, seed=seeds, size=sizes)
    def write(self, slot: int, seed: int, size: int) -> None:
        slot = self.pick(slot)

        def act(side: Side) -> int:
            return os.write(side.slots[slot], stream(seed, os.lseek(side.slots[slot], 0, os.SEEK_CUR), size))

        self.do(act)

    @precondition(has_slot)
    @rule(slot=slots, offset=offsets, seed=seeds, size=sizes)
    def pwrite(self, slot: int, offset: int, seed: int, size: int) -> None:
        slot = self.pick(slot)
        self.do(lambda side: os.pwrite(side.slots[slot], stream(seed, offset, size), offset))

    @precondition(has_slot)
    @rule(slot=slots, offset=st.one_of(offsets, st.integers(-9, -1)), whence=st.integers(0, 2))
    def lseek(self, slot: int, offset: int, whence: int) -> None:
        slot = self.pick(slot)

        def act(side: Side) -> object:
            if stat.S_ISDIR(os.fstat(side.slots[slot]).st_mode):
                return None  # places in a directory are nobody's business
            return os.lseek(side.slots[slot], offset, whence)

        self.do(act)

    @precondition(has_slot)
    @rule(slot=slots, size=st.one_of(sizes, st.just(1 << 28)))
    def ftruncate(self, slot: int, size: int) -> None:
        slot = self.pick(slot)
        self.do(lambda side: os.ftruncate(side.slots[slot], size))

    @precondition(has_slot)
    @rule(slot=slots, offset=offsets, seed=seeds, size=st.integers(1, 9000), sync=st.booleans())
    def store(self, slot: int, offset: int, seed: int, size: int, sync: bool) -> None:
        slot = self.pick(slot)

        def act(side: Side) -> object:
            found = os.fstat(side.slots[slot])
            if not stat.S_ISREG(found.st_mode) or not found.st_size:
                return None  # nothing to be mapped
            try:
                return side.store(slot, offset, stream(seed, offset, size), sync)
            except PermissionError:
                return errno.EACCES

        self.do(act)

    @precondition(has_slot)
    @rule(source=slots, sink=slots, size=st.integers(0, 5000))
    def copy_file_range(self, source: int, sink: int, size: int) -> None:
        source, sink = self.pick(source), self.pick(sink)
        self.do(lambda side: os.copy_file_range(side.slots[source], side.slots[sink], size, 0, 0))

    @precondition(has_slot)
    @rule(slot=slots, data_only=st.booleans())
    def fsync(self, slot: int, data_only: bool) -> None:
        slot = self.pick(slot)
        self.do(lambda side: (os.fdatasync if data_only else os.fsync)(side.slots[slot]))

    @precondition(has_slot)
    @rule(slot=slots, mode=st.none() | modes, atime=times, mtime=times, xattr=st.none() | xattrs, value=values)
    def change_open(
        self, slot: int, mode: int | None, atime: int | None, mtime: int | None, xattr: str | None, value: bytes
    ) -> None:
        slot = self.pick(slot)
        if mode is not None:
            self.do(lambda side: os.fchmod(side.slots[slot], mode))
        if xattr is not None:
            self.do(lambda side: side.set_xattr(side.slots[slot], xattr, value, 0))
        self.do(lambda side: model.futimens(side.slots[slot], atime, mtime))

    @precondition(has_slot)
    @rule(slot=slots)
    def close(self, slot: int) -> None:
        slot = self.pick(slot)
        self.do(lambda side: side.close(slot))

    # --- the daemon

    @precondition(lambda self: self.restarts and len(self.script) > 2 * LIVED)
    @rule()
    def restart(self) -> None:
        """A remount, or kill -9 once everything was flushed: everything is as it was, but what had no name is gone."""
        how = self.restarts.pop()

        def act(side: Side) -> None:
            if side is self.pair.mounted and how == "crash":
                control.call(self.mounted.state, "flush", 60)
                self.mounted.kill()
            side.close_all()
            if side is self.pair.mounted:
                (self.mounted.start if how == "crash" else self.mounted.remount)()

        self.pair.compare_all()
        self.do(act)
        self.pair.compare_all()


def run(mounted: Mount, plain: pathlib.Path, pytestconfig: pytest.Config) -> None:
    plain.mkdir()
    name = f"Operations_{mounted.config is None}"
    made = type(name, (Operations,), {"mounted": mounted, "plain": plain, "exact": exact_clock(plain)})
    made.runs = iter(range(1 << 30))
    settings = hypothesis.settings(
        max_examples=pytestconfig.getoption("--model-rounds"),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    run_state_machine_as_test(hypothesis.seed(pytestconfig.getoption("--seed"))(made), settings=settings)
    assert "Traceback" not in mounted.log()
    assert mounted.fsck() == []


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_mount_does_what_a_plain_directory_does(
    mount: Mount, tmp_path: pathlib.Path, pytestconfig: pytest.Config
) -> None:
    run(mount, tmp_path / "plain", pytestconfig)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_journals_do_what_a_plain_directory_does(
    journal_mount: Mount, tmp_path: pathlib.Path, pytestconfig: pytest.Config
) -> None:
    assert journal_mount.config == ALL_JOURNALS
    run(journal_mount, tmp_path / "plain", pytestconfig)
