"""The power goes. What was not synced is gone with it, and everything that was promised is there.

The state folder lies on a disk of its own (`loopdisk`). The cut comes at a random instant, or at a step of the daemon
chosen by chance: everything is stopped, the disk is copied as it is, the copy is mounted and recovered, and goes on to
the next cut. Before a cut, single files of the state folder are written back, as the kernel may do at any time.
`--crash-rounds N` says how many cuts, `--seed` which.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import sqlite3
from collections.abc import Callable, Iterator

import pytest
from crashing import HURRIED, Load, cut, some_step, without_inodes
from faults import Fault, FaultyMount
from loopdisk import LoopDisk, unavailable, write_back, write_back_pages
from mounting import wait_until
from promises import Found

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[LoopDisk]:
    with LoopDisk(tmp_path / "disk.image", tmp_path / "disk") as made:
        yield made


class Machine:
    """A mount on a disk, and the power that it hangs on."""

    def __init__(self, folder: pathlib.Path, disk: LoopDisk) -> None:
        self.folder = folder
        self.disk = disk
        self.cuts = 0
        self.mount = self._mount()

    def _mount(self, config: str | None = None, *faults: Fault) -> FaultyMount:
        mount = FaultyMount(self.folder / "mount", self.disk.path / "state", config, *faults)
        mount.boot = f"{self.folder}/boot{self.cuts}"
        pathlib.Path(mount.boot).write_text(f"boot {self.cuts}")
        return mount

    @property
    def path(self) -> pathlib.Path:
        return self.mount.path

    def start(self, *faults: Fault, config: str | None = None) -> None:
        self.mount = self._mount(config, *faults)
        self.mount.start()

    def cut(self) -> None:
        """The power goes and comes back. Nothing is mounted yet."""
        self.cuts += 1
        self.disk = cut(self.mount, self.disk, self.folder, f"disk{self.cuts}")
        self.mount = self._mount()

    def live_file(self, path: pathlib.Path) -> pathlib.Path:
        number = path.stat().st_ino
        return self.mount.state / "live" / f"{number % 256:02x}" / str(number)

    def write_back_names(self) -> None:
        """The namespace's log gets to the disk although nobody asked for it."""
        write_back(self.mount.state / "namespace.db-wal")

    def clear(self) -> None:
        self.mount.clear()
        self.disk.detach()


@pytest.fixture
def machine(tmp_path: pathlib.Path, disk: LoopDisk) -> Iterator[Machine]:
    made = Machine(tmp_path, disk)
    try:
        made.start()
        yield made
    finally:
        made.clear()


def test_the_cut_takes_what_was_not_synced_and_nothing_else(disk: LoopDisk, tmp_path: pathlib.Path) -> None:
    """Else none of the tests here would mean anything."""
    for name in ("synced", "not synced"):
        (disk.path / name).write_bytes(bytes(10_000))
    write_back(disk.path / "synced")
    with disk.cut(tmp_path / "copy.image", tmp_path / "copy") as copy:
        assert (copy.path / "synced").read_bytes() == bytes(10_000)
        lost = copy.path / "not synced"
        assert not lost.exists() or lost.stat().st_size == 0


@pytest.mark.timeout(3600)
def test_what_was_promised_is_there_after_a_power_cut_at_any_instant(
    machine: Machine, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    kept: list[tuple[Load, list[Found]]] = []
    armed = tmp_path / "armed"
    for number in range(request.config.getoption("--crash-rounds")):
        name = f"{request.config.getoption('--seed')} power {number}"
        chance = random.Random(name)
        load = Load(tmp_path, [f"{name} {worker}" for worker in range(2)])
        try:
            _run_until_the_cut(machine, load, chance, armed)
            machine.cut()
            load.end()
        finally:
            load.clear()
        armed.unlink(missing_ok=True)
        if chance.random() < 0.3:  # and goes again, during recovery
            machine.start(dataclasses.replace(some_step(chance, "stop"), nth=chance.randrange(1, 8)))
            machine.cut()
        rescued = tmp_path / f"rescued{number}"
        assert machine.mount.fsck() == [], name
        machine.mount.rescue(rescued)
        machine.start(some_step(chance, "stop", armed), config=chance.choice((None, HURRIED)))
        kept.append((load, load.judge(machine.path, killed=False)))
        assert without_inodes(kept[-1][1]) == without_inodes(load.found(rescued)), f"{name}: rescue has another tree"
        for earlier, found in kept:
            assert earlier.found(machine.path) == found, f"{name}: what a cut had left changed later"
        assert machine.mount.fsck() == [], name


def _run_until_the_cut(machine: Machine, load: Load, chance: random.Random, armed: pathlib.Path) -> None:
    """Returns when the power is to go: at a step of the daemon, else after some operations."""
    armed.unlink(missing_ok=True)
    load.start(machine.mount)
    end, operations = chance.randrange(20, 800), 0
    if chance.random() < 0.5:
        armed.touch()
    while operations < end:
        operations += chance.randrange(1, 150)
        wait_until(
            lambda goal=operations: machine.mount.stopped or load.ended or load.operations >= goal, str(load.seeds)
        )
        if machine.mount.stopped:
            return
        if chance.random() < 0.7:
            _write_something_back(machine, chance)


def _write_something_back(machine: Machine, chance: random.Random) -> None:
    if chance.random() < 0.3:
        machine.write_back_names()
        return
    files = sorted(path for path in (machine.mount.state / "live").glob("*/*"))
    if files:
        write_back(chance.choice(files))


def test_fsync_of_a_file_keeps_the_names_that_lead_to_it(machine: Machine) -> None:
    deep = machine.path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    _sync(_written(deep / "file", b"bytes"))
    os.link(deep / "file", machine.path / "a" / "other name")
    (machine.path / "a").rename(machine.path / "A")
    _sync(machine.path / "A" / "b" / "c" / "file")
    machine.cut()
    machine.start()
    assert (machine.path / "A" / "b" / "c" / "file").read_bytes() == b"bytes"
    assert (machine.path / "A" / "other name").stat().st_nlink == 2
    assert not (machine.path / "a").exists()


def test_fsync_of_a_directory_keeps_its_entries(machine: Machine) -> None:
    (machine.path / "d").mkdir()
    _sync(_written(machine.path / "d" / "old", b"x"))
    (machine.path / "d" / "old").rename(machine.path / "d" / "new")
    (machine.path / "d" / "link").symlink_to("new")
    _sync(machine.path / "d")
    machine.cut()
    machine.start()
    assert sorted(os.listdir(machine.path / "d")) == ["link", "new"]
    assert (machine.path / "d" / "link").read_bytes() == b"x"


@pytest.mark.parametrize("how", ["rename", "rewrite"])
def test_a_file_replaced_without_fsync_is_whole_although_another_ones_fsync_came_between(
    machine: Machine, how: str
) -> None:
    old, new = b"old " * 20_000, b"new " * 30_000
    target = machine.path / "target"
    _sync(_written(target, old))
    if how == "rename":
        _written(machine.path / "temporary", new).rename(target)
    else:
        target.write_bytes(new)
    _sync(_written(machine.path / "another", b"x"))
    machine.cut()
    machine.start()
    assert target.read_bytes() in (old, new)
    assert (machine.path / "another").read_bytes() == b"x"


def test_a_file_whose_rewrite_is_not_finished_is_the_old_one(machine: Machine) -> None:
    old = b"old " * 20_000
    _sync(_written(machine.path / "target", old))
    with open(machine.path / "target", "wb", buffering=0) as file:
        file.write(b"half of the new")
        for number in range(20):  # each lets the background work run
            _sync(_written(machine.path / f"other{number}", b"x"))
            (machine.path / f"other{number}").write_bytes(b"rewritten")
        machine.cut()
    machine.start()
    assert (machine.path / "target").read_bytes() == old


def test_a_journal_ends_before_the_bytes_that_it_lost_also_if_it_was_another_file_before(machine: Machine) -> None:
    """Nobody has looked yet whether NULs belong in it. It was synced, and then it became shorter and grew again."""
    machine.mount.stop()
    machine.start(config="[limits]\nnote_seconds = 1000")
    journal, other = machine.path / "j.jsonl", machine.path / "other"
    _sync(_written(journal, b'{"n": 0}\n'))
    _written(machine.path / "temporary", b'{"n": 1}\n' * 300).rename(journal)
    _sync(journal)
    machine.cut()
    machine.start(config="[limits]\nnote_seconds = 1000")
    with open(journal, "ab") as file:
        file.write(b'{"n": 1}\n' * 100)
    _sync(journal)
    written = b'{"n": 1}\n' * 10 + b'{"n": 2}\n' * 10
    journal.write_bytes(written)
    for number in range(3):
        _sync(_written(other, b"%d" % number))  # has the filesystem below commit what it knows of sizes
        with open(journal, "ab") as file:
            file.write(b'{"n": 3}\n' * 50)
        written += b'{"n": 3}\n' * 50
    machine.cut()
    machine.start()
    content = journal.read_bytes()
    assert b"\0" not in content
    assert content == b'{"n": 1}\n' * 400 or written.startswith(content)
    assert len(content) >= len(b'{"n": 1}\n' * 10)


LATE = "[limits]\nnote_seconds = 1000"  # no background work comes between


def _rewritten(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(content)


def _shortened(path: pathlib.Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.truncate(900)
        file.seek(900)
        file.write(content[900:])


def _appended_later(path: pathlib.Path, content: bytes) -> None:
    os.truncate(path, 900)
    with open(path, "ab", buffering=0) as file:
        file.writelines(content[start : start + 1000] for start in range(900, len(content), 1000))


@pytest.mark.parametrize("filler", [b"-", b"\0"], ids=("text", "nuls"))
@pytest.mark.parametrize("change", [_rewritten, _shortened, _appended_later])
def test_a_journal_that_was_truncated_never_has_old_bytes_behind_new_ones(
    machine: Machine, change: Callable[[pathlib.Path, bytes], None], filler: bytes
) -> None:
    """The disk has the new bytes, in the place of old ones, but did not hear yet that the file became shorter."""
    machine.mount.stop()
    machine.start(config=LATE)
    journal = machine.path / "j.jsonl"
    old = b"old" * 6000
    new = old[:900] + b"new" * 3000
    _sync(_written(journal, old.replace(b"d", filler)))
    change(journal, new.replace(b"d", filler).replace(b"n", filler))
    write_back_pages(machine.live_file(journal))
    machine.cut()
    machine.start()
    found = journal.read_bytes()
    assert found == old.replace(b"d", filler) or new.replace(b"d", filler).replace(b"n", filler).startswith(found)
    assert len(found) >= 900
    assert machine.mount.fsck() == []


@pytest.mark.parametrize("filler", [b"-", b"\0"], ids=("text", "nuls"))
def test_a_journal_that_was_truncated_has_no_zeros_before_old_bytes(machine: Machine, filler: bytes) -> None:
    """What the filesystem below does to the rest of the last block is on the disk, the new size is not."""
    machine.mount.stop()
    machine.start(config=LATE)
    journal = machine.path / "j.jsonl"
    old = (b"old" * 6000).replace(b"d", filler)
    _sync(_written(journal, old))
    os.truncate(journal, 901)
    write_back_pages(machine.live_file(journal))
    machine.cut()
    machine.start()
    assert journal.read_bytes() in (old, old[:901])


def test_what_is_synced_after_a_truncation_is_kept_with_its_nuls(machine: Machine) -> None:
    """Of a journal in which NULs belong, truncated, written on and synced, nothing is lost with what comes later."""
    machine.mount.stop()
    machine.start(config=LATE)
    journal = machine.path / "j.jsonl"
    _sync(_written(journal, b"o\0d" * 6000))
    os.truncate(journal, 900)
    with open(journal, "ab") as file:
        file.write(b"\0synced" * 1000)
        file.flush()
        os.fsync(file.fileno())
        file.write(b"\0not synced" * 1000)
    write_back(machine.live_file(journal))
    machine.cut()
    machine.start()
    found = journal.read_bytes()
    assert found.startswith(b"o\0d" * 300 + b"\0synced" * 1000)


def test_everything_is_there_when_the_power_goes_after_umount_returned(machine: Machine) -> None:
    for number in range(50):
        _written(machine.path / f"file{number}", b"%d" % number * 1000)
        _written(machine.path / f"journal{number}.jsonl", b'{"n": %d}\n' % number)
    (machine.path / "file0").write_bytes(b"rewritten")
    (machine.path / "file1").unlink()
    machine.mount.stop()
    copy = machine.disk.cut(machine.folder / "copy.image", machine.folder / "copy")
    machine.disk.detach()
    machine.disk = copy
    copy.attach()
    machine.start()
    assert machine.mount.status()["recovery"] | {"clean": True} == machine.mount.status()["recovery"]
    assert (machine.path / "file0").read_bytes() == b"rewritten"
    for number in range(2, 50):
        assert (machine.path / f"file{number}").read_bytes() == b"%d" % number * 1000
        assert (machine.path / f"journal{number}.jsonl").read_bytes() == b'{"n": %d}\n' % number
    assert not (machine.path / "file1").exists()
    assert machine.mount.fsck() == []


def test_what_was_renamed_before_a_kill_is_kept_by_an_fsync_after_it(machine: Machine) -> None:
    """The new daemon must not believe that what it finds in the log is on the disk."""
    _sync(_written(machine.path / "old", b"x"))
    machine.mount.remount()
    (machine.path / "old").rename(machine.path / "new")
    _commit(machine, "new", exists=True)
    machine.mount.crash()
    _sync(machine.path / "new")
    machine.cut()
    machine.start()
    assert os.listdir(machine.path) == ["new"]


def test_bytes_go_only_after_the_removal_of_their_name_is_durable(machine: Machine) -> None:
    path = machine.path / "file"
    _sync(_written(path, b"bytes"))
    live = machine.live_file(path)
    path.unlink()
    wait_until(lambda: not live.exists(), "the removal of the bytes")
    write_back(live.parent)
    machine.cut()
    machine.start()
    assert not path.exists()
    assert machine.mount.fsck() == []


def test_bytes_go_only_after_the_removal_of_their_name_is_durable_also_after_a_kill(machine: Machine) -> None:
    """Recovery finds a removal that is committed, but not on the disk, and the power goes while it frees the bytes."""
    _sync(_written(machine.path / "file", b"bytes"))
    machine.mount.stop()
    machine.start(Fault("deltapool.fs.settle:Settler.reap", "wait", seconds=60))  # it never comes to freeing them
    live = machine.live_file(machine.path / "file")
    (machine.path / "file").unlink()
    _commit(machine, "file", exists=False)
    machine.mount.kill()
    machine.start(Fault("deltapool.fs.namespace:Namespace.close_graves", "stop"))
    assert machine.mount.stopped
    write_back(live.parent)
    machine.cut()
    machine.start()
    assert not (machine.path / "file").exists() or (machine.path / "file").read_bytes() == b"bytes"
    assert machine.mount.fsck() == []


def test_numbers_of_inodes_that_the_cut_took_are_not_given_to_others(machine: Machine) -> None:
    """Their bytes may have reached the disk although their names did not."""
    _written(machine.path / "lost", b"bytes without a name")
    write_back(machine.live_file(machine.path / "lost"))
    number = (machine.path / "lost").stat().st_ino
    machine.cut()
    machine.start()
    made = [_written(machine.path / f"new{each}", b"new") for each in range(5)]
    assert number not in [path.stat().st_ino for path in made]
    assert {path.read_bytes() for path in made} == {b"new"}
    wait_until(lambda: machine.mount.status()["audit"]["done"], "the end of the audit")
    assert machine.mount.fsck() == []


def _written(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.write_bytes(content)
    return path


def _sync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _commit(machine: Machine, name: str, *, exists: bool) -> None:
    """Waits until what was acknowledged is committed. Nothing of it need be on the disk."""
    query = "SELECT count(*) FROM dentry WHERE name = ?"
    with contextlib.closing(sqlite3.connect(f"file:{machine.mount.state}/namespace.db?mode=ro", uri=True)) as reader:
        wait_until(lambda: reader.execute(query, (name.encode(),)).fetchone() == (int(exists),), f"a commit of {name}")
