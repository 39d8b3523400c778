"""Unmounting, from outside: write back, unmount, and who is in the way. Runs in the command, or in a thread of the fs
process.

What may hang on a dead or busy mount (sync, stat) runs in a child with a time-out. Users are found in /proc.
"""

import dataclasses
import logging
import os
import pathlib
import shutil
import subprocess
import time

from deltapool.fs.errors import UserError
from deltapool.fs.state import folder_of

SYNC_SECONDS = 120.0
CHECK_SECONDS = 5.0
HOLDERS_SHOWN = 20

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Mounted:
    """One line of /proc/self/mounts that is ours."""

    mountpoint: pathlib.Path
    state: pathlib.Path


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    pid: int
    program: str
    what: str


def mounts() -> list[Mounted]:
    """All mounts of deltapool that this process sees."""
    found = []
    for line in pathlib.Path("/proc/self/mounts").read_bytes().splitlines():
        source, target, kind, *_ = line.split(b" ")
        if kind == b"fuse.deltapool":
            found.append(Mounted(pathlib.Path(_unescape(target)), folder_of(source)))
    return found


def mounted_at(directory: pathlib.Path) -> Mounted | None:
    """The mount whose mountpoint is `directory`, dead or alive; the uppermost if there are several."""
    wanted = pathlib.Path(os.path.abspath(directory))
    candidates = [each for each in mounts() if each.mountpoint in (wanted, _resolved_parent(wanted))]
    return candidates[-1] if candidates else None


def _resolved_parent(path: pathlib.Path) -> pathlib.Path:
    """The path with links in its folder resolved. The last component is not looked at: it may be a dead mount."""
    return pathlib.Path(os.path.realpath(path.parent)) / path.name


def _unescape(field: bytes) -> str:
    return os.fsdecode(
        field.replace(b"\\040", b" ").replace(b"\\011", b"\t").replace(b"\\012", b"\n").replace(b"\\134", b"\\")
    )


def answers(directory: pathlib.Path) -> bool:
    """Whether a stat of the directory is answered within a bounded time."""
    try:
        return (
            subprocess.run(
                ["stat", "--", str(directory)], capture_output=True, timeout=CHECK_SECONDS, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def write_back(mountpoint: pathlib.Path) -> None:
    """Makes the kernel write dirty mapped pages. `sync` sends no request, but the pages arrive as writes."""
    try:
        subprocess.run(["sync", "-f", str(mountpoint)], capture_output=True, timeout=SYNC_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{mountpoint}: dirty pages could not be written back within {SYNC_SECONDS:g} s") from None


def fusermount(*arguments: str) -> str | None:
    """Runs fusermount3; what it complains about, or None."""
    program = shutil.which("fusermount3")
    if program is None:
        raise UserError("fusermount3 is missing: install the package fuse3")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"


def unmount(mounted: Mounted, *, force: bool) -> bool:
    """Writes back and unmounts. Raises UserError, with the holders, if it is busy; with `force` it is then detached,
    and served until they let go. Returns whether it was detached only."""
    if answers(mounted.mountpoint):
        write_back(mounted.mountpoint)
    complaint = fusermount("-u", str(mounted.mountpoint))
    if complaint is None:
        return False
    found = holders(mounted.mountpoint)
    if force:
        complaint = fusermount("-uz", str(mounted.mountpoint))
        if complaint is not None:
            raise UserError(f"{mounted.mountpoint} could not be detached: {complaint}")
        return True
    if not found:
        raise UserError(f"{mounted.mountpoint} could not be unmounted: {complaint}")
    shown = "\n".join(f"  pid {each.pid} ({each.program}): {each.what}" for each in found[:HOLDERS_SHOWN])
    more = f"\n  and {len(found) - HOLDERS_SHOWN} more" if len(found) > HOLDERS_SHOWN else ""
    raise UserError(
        f"{mounted.mountpoint} is in use, and was not unmounted. Let these go, or give --force:\n{shown}{more}"
    )


def detach_for_stop(mountpoint: pathlib.Path) -> None:
    """What a stopping fs process does: unmount, or detach if it is busy. It goes on serving until the last user lets
    go."""
    mounted = mounted_at(mountpoint)
    if mounted is None:
        return
    try:
        unmount(mounted, force=False)
    except UserError as error:
        log.warning("stopping: %s", error)
        fusermount("-uz", str(mountpoint))


def holders(mountpoint: pathlib.Path) -> list[Holder]:
    """Who has a file, a folder, a mapping or a program below `mountpoint` in use."""
    found = []
    prefix = f"{mountpoint}/"

    def inside(path: str) -> bool:
        return path == str(mountpoint) or path.startswith(prefix)

    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            program = (process / "comm").read_text().strip()
            links = [("cwd", process / "cwd"), ("root", process / "root"), ("program", process / "exe")]
            links += [(f"fd {entry.name}", entry) for entry in (process / "fd").iterdir()]
            for what, link in links:
                if inside(path := os.readlink(link)):
                    found.append(Holder(int(process.name), program, f"{what} {path}"))
            mapped = {
                line.split(maxsplit=5)[5].strip() for line in (process / "maps").read_text().splitlines() if "/" in line
            }
            found += [Holder(int(process.name), program, f"mapping {path}") for path in sorted(mapped) if inside(path)]
        except OSError:
            continue  # it ended, or belongs to somebody else
    return found


def wait_for_end(pid: int, seconds: float) -> bool:
    """Whether a process has ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not pathlib.Path(f"/proc/{pid}").exists():
            return True
        try:
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (OSError, IndexError):
            return True
        time.sleep(0.02)
    return False
