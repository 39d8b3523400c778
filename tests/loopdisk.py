"""A disk of its own for a state folder: ext4 in an image file on a loop device, whose power can be cut.

Reading the image file gives exactly what was written to the device. What ext4 and its users have in memory, and did not
sync, is not in it. So a copy of the image, taken while nobody is in the middle of a system call, is what a disk holds
after the power went, and mounting the copy is what the machine does when it comes back.

ext4 commits its journal every five seconds and the kernel writes back what has been dirty for thirty. The first is
switched off (`commit`), and a cut comes sooner than the second. What is written back early is up to the test
(`write_back`): a disk may always be further than it was asked to be.
"""

import ctypes
import os
import pathlib
import subprocess
from types import TracebackType

from mounting import wait_until

COMMIT_SECONDS = 600
WAIT_WRITE_WAIT = 1 | 2 | 4  # of sync_file_range: before, write, after
TOOLS = ("mkfs.ext4", "losetup", "mount", "umount")


class LoopDisk:
    """`path` is where it is mounted. Needs root and loop devices; `unavailable` says why there are none."""

    def __init__(self, image: pathlib.Path, path: pathlib.Path, mebibytes: int = 256, options: str = "") -> None:
        self.image = image
        self.path = path
        self.mebibytes = mebibytes
        self.options = options
        self.device: str | None = None

    def __enter__(self) -> "LoopDisk":
        try:
            self.attach()
        except BaseException:
            self.detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
        self.image.unlink(missing_ok=True)

    def attach(self) -> None:
        """Makes the image if there is none, and mounts it: ext4 recovers its own journal."""
        if not self.image.exists():
            with open(self.image, "wb") as file:
                file.truncate(self.mebibytes << 20)
            # Written at once, not by a thread of the kernel later on.
            now = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
            _run("mkfs.ext4", "-q", "-m", "0", "-E", now, str(self.image))
        self.path.mkdir(exist_ok=True)
        self.device = _run("losetup", "--find", "--show", str(self.image)).strip()
        options = f"commit={COMMIT_SECONDS}" + (f",{self.options}" if self.options else "")
        _run("mount", "-t", "ext4", "-o", options, self.device, str(self.path))

    def detach(self) -> None:
        if os.path.ismount(self.path):
            wait_until(self._unmounted, f"an unmount of {self.path}")
        if self.device is not None:
            _run("losetup", "--detach", self.device)
            self.device = None

    def _unmounted(self) -> bool:
        """False while somebody is looking at it, as programs do that look at every process or mount."""
        return subprocess.run(["umount", str(self.path)], capture_output=True, check=False).returncode == 0

    def cut(self, image: pathlib.Path, path: pathlib.Path) -> "LoopDisk":
        """What the disk holds if the power goes now: a copy, not attached yet. Nobody may be using the disk."""
        _run("cp", "--sparse=always", str(self.image), str(image))
        return LoopDisk(image, path, self.mebibytes, self.options)

    def fill(self) -> pathlib.Path:
        """Another program takes all that is free, to the last block. The file that it made."""
        path = self.path / "filler"
        with open(path, "ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                block = bytes(size)
                try:
                    while True:
                        file.write(block)
                        os.fsync(file.fileno())  # delayed allocation finds out only then
                except OSError:
                    continue
        return path

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


def write_back(path: pathlib.Path) -> None:
    """The kernel may write any dirty file to the disk whenever it likes: now it does, for this one."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # it has just been removed
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def write_back_pages(path: pathlib.Path) -> None:
    """The same for the bytes alone: of a size that changed the disk knows nothing yet (sync_file_range(2))."""
    with open(path, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        start, size = ctypes.c_int64(0), ctypes.c_int64(0)
        if libc.sync_file_range(file.fileno(), start, size, WAIT_WRITE_WAIT) != 0:
            raise OSError(ctypes.get_errno(), "sync_file_range")


def unavailable() -> str | None:
    """Why this machine has no loop disks, None if it has."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if not os.path.exists("/dev/loop-control"):
        return "this machine has no /dev/loop-control"
    missing = [tool for tool in TOOLS if subprocess.run(["which", tool], capture_output=True, check=False).returncode]
    return f"not installed: {', '.join(missing)}" if missing else None


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
