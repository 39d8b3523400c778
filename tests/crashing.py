"""What the tests of crashes share: workers that load a mount, the steps at which to strike, and cutting the power."""

import os
import pathlib
import random
import signal
import subprocess
import sys

from faults import Fault, FaultyMount
from loopdisk import LoopDisk
from mounting import Mount, wait_until
from promises import Found, Progress, judge, look, progress

WORKER = pathlib.Path(__file__).parent / "worker.py"
OPERATIONS_MAX = 100_000

# Background work ten times as often as it is by default: more of it falls between two operations.
HURRIED = """[limits]
settle_seconds = 0.1
note_seconds = 0.05
journal_idle_seconds = 0.2
reap_seconds = 0.05
wal_checkpoint_bytes = 65536
"""

# Every step that changes something on the disk, or says that something is there. Struck before and after.
STEPS = (
    "deltapool.fs.database:Database.commit",
    "deltapool.fs.database:_checkpoint",
    "deltapool.fs.livefile:LiveStore.create",
    "deltapool.fs.livefile:LiveStore.begin_rewrite",
    "deltapool.fs.livefile:LiveStore.sync_data",
    "deltapool.fs.livefile:LiveStore.sync_folder",
    "deltapool.fs.livefile:LiveStore.sync_all",
    "deltapool.fs.livefile:LiveStore.promote",
    "deltapool.fs.livefile:LiveStore.remove",
    "deltapool.fs.livefile:LiveFile.write",
    "deltapool.fs.livefile:LiveFile.truncate",
    "deltapool.fs.namespace:Namespace.clear_dirty",
    "deltapool.fs.namespace:Namespace.close_graves",
    "deltapool.fs.namespace:Namespace.mark_dirty",
    "deltapool.fs.namespace:Namespace.note_journal",
    "os:fdatasync",
    "os:fsync",
)


def some_step(chance: random.Random, then: str, armed_by: pathlib.Path | None = None) -> Fault:
    """A step at which something happens, chosen by chance."""
    step, when = chance.choice(STEPS), chance.choice(("before", "after"))
    nth = min(int(chance.paretovariate(0.5)), 200)
    return Fault(step, then, when, nth, str(armed_by) if armed_by is not None else None)


class Load:
    """Workers, each in a directory of its own, and what they must find again."""

    def __init__(self, folder: pathlib.Path, seeds: list[str]) -> None:
        self.folder = folder
        self.seeds = seeds
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, mount: Mount) -> None:
        for number, seed in enumerate(self.seeds):
            words = [WORKER, seed, self.root(number), self._log(number), OPERATIONS_MAX]
            # It starts inside: should the mount go at once, nothing may land in the folder under it.
            worker = subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.PIPE, cwd=mount.path)
            self._workers.append(worker)

    def root(self, number: int) -> str:
        return self.seeds[number].replace(" ", "-")

    def _log(self, number: int) -> pathlib.Path:
        return self.folder / f"{self.root(number)}.log"

    def reached(self, number: int) -> Progress:
        return progress(self._log(number))

    @property
    def operations(self) -> int:
        """How many were acknowledged, of all workers together."""
        return sum(self.reached(number).done + 1 for number in range(len(self.seeds)))

    @property
    def ended(self) -> bool:
        return any(worker.poll() is not None for worker in self._workers)

    def wait(self, operations: int) -> None:
        wait_until(lambda: self.ended or self.operations >= operations, f"{operations} operations of {self.seeds}")

    def end(self, *, kill: bool = False) -> None:
        """Waits until the workers have met the end of the mount; or ends them. They must have failed at nothing
        else."""
        for worker in self._workers:
            if kill:
                worker.kill()
            _, said = worker.communicate(timeout=60)
            assert worker.returncode == (-signal.SIGKILL if kill else 0), said.decode()
        self._workers.clear()

    def clear(self) -> None:
        """After a test that failed: nothing goes on."""
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def found(self, below: pathlib.Path) -> list[Found]:
        """What lies below a mount, or what was rescued from one."""
        return [look(below / self.root(number)) for number in range(len(self.seeds))]

    def judge(self, below: pathlib.Path, *, killed: bool) -> list[Found]:
        found = self.found(below)
        for number, (seed, each) in enumerate(zip(self.seeds, found, strict=True)):
            judge(seed, self.reached(number), each, killed=killed)
        return found


def without_inodes(found: list[Found]) -> list[dict[str, tuple[object, ...]]]:
    """Trees that are the same although they lie in different filesystems."""
    return [
        {path: (kind, what if kind == "link" else "", content) for path, (kind, what, content) in each.items()}
        for each in found
    ]


def stop(mount: FaultyMount) -> None:
    """Every thread of the daemon is stopped, none of them in a system call."""
    os.kill(mount.pid, signal.SIGSTOP)
    wait_until(lambda: mount.stopped, "a stop of the daemon")


def cut(mount: FaultyMount, disk: LoopDisk, folder: pathlib.Path, name: str) -> LoopDisk:
    """The power goes: what is on the disk now, attached at another place. The mount and the old disk are gone."""
    stop(mount)
    copy = disk.cut(folder / f"{name}.image", folder / name)
    mount.kill()
    disk.detach()
    disk.image.unlink()
    copy.attach()
    return copy
