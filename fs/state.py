"""The state folder of one volume: what lies where, who uses it, and whether this program may.

state.json      format, volume name and id
lock            held (flock) by the fs process that serves the volume; holds its pid
namespace.db    the tree (`database`, `namespace`); -wal and -shm beside it
live/           the bytes (`livefile`)
lost/           live files without an inode that were found after a crash
control.sock    where commands reach the fs process
log/            what the fs process has to say
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import time
import urllib.parse
import uuid

from deltapool.fs.errors import StateError

FORMAT = 1
STATE_FILE, LOCK_FILE, NAMESPACE_FILE = "state.json", "lock", "namespace.db"
CONTROL_SOCKET, LOG_FOLDER, LOG_FILE, LOST_FOLDER = "control.sock", "log", "deltapool.log", "lost"
LIVE_FOLDER, LIVE_DIRECTORIES = "live", 256

LOCK_PAUSES_SECONDS = (0.01, 0.01, 0.01)  # a command that asks who holds a folder holds it for an instant itself


@dataclasses.dataclass(frozen=True, slots=True)
class Volume:
    name: str
    id: str


class State:
    """An open state folder; `close` lets go of it."""

    def __init__(self, folder: pathlib.Path, volume: Volume, lock: int) -> None:
        self.folder = folder
        self.volume = volume
        self._lock = lock

    @property
    def namespace(self) -> pathlib.Path:
        return self.folder / NAMESPACE_FILE

    @property
    def mount_source(self) -> str:
        """What /proc/mounts shows, so that commands find the folder: its path, quoted as in a URL. libfuse takes ASCII
        only, and its options and the kernel's list have special characters of their own."""
        return urllib.parse.quote(os.fsencode(self.folder))

    def close(self) -> None:
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def default_volume(mountpoint: pathlib.Path) -> str:
    """A label for a volume that was given no name: the same for the same mountpoint, different for different ones."""
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', mountpoint.name) or 'root'}-{digest}"


def default_folder(volume: str, environment: dict[str, str]) -> pathlib.Path:
    base = environment.get("XDG_STATE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".local", "state"
    )
    return pathlib.Path(base) / "deltapool" / volume


def folder_of(mount_source: bytes) -> pathlib.Path:
    """The state folder behind what /proc/mounts shows."""
    return pathlib.Path(os.fsdecode(urllib.parse.unquote_to_bytes(mount_source)))


def check_volume_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise StateError(
            f"{name!r} is no volume name: letters, digits, '.', '_' and '-', at most 128, a letter or digit first"
        )


def open_state(folder: pathlib.Path, volume: str) -> State:
    """Opens or makes a state folder and locks it. Raises StateError if it is in use, newer, or not one of ours."""
    if os.fsencode(folder).decode("utf-8", "replace") != str(folder):
        raise StateError(f"the path of the state folder {folder} is no UTF-8, as SQLite needs it: give another --state")
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(f"the state folder {folder} cannot be made: {error.strerror}") from None
    if made:
        os.chmod(folder, 0o700)
    if not (folder / STATE_FILE).exists():
        others = [
            entry.name
            for entry in os.scandir(folder)
            if entry.name not in (LOCK_FILE, LOG_FOLDER, f"{STATE_FILE}.new", "live")
        ]
        if others:
            raise StateError(
                f"{folder} holds {others[0]!r} but no {STATE_FILE}: it is no state folder. Choose another with --state."
            )
    lock = _lock(folder)
    try:
        return State(folder, _volume(folder, volume), lock)
    except BaseException:
        os.close(lock)
        raise


def _lock(folder: pathlib.Path) -> int:
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for pause in (*LOCK_PAUSES_SECONDS, None):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if pause is not None:
                time.sleep(pause)
                continue
            pid = os.pread(fd, 64, 0).decode(errors="replace").strip()
            os.close(fd)
            lives = pid.isdigit() and os.path.exists(f"/proc/{pid}")  # rescue leaves the pid of a dead daemon there
            raise StateError(f"the state folder {folder} is in use by pid {pid if lives else 'unknown'}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def holder(folder: pathlib.Path) -> int | None:
    """The pid of the fs process that holds a state folder, None if nobody does."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(fd, 64, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)


def read_volume(folder: pathlib.Path) -> Volume:
    """What state.json says. Raises StateError if it is missing, damaged or newer."""
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_text())
        version, volume = int(content["format"]), Volume(str(content["volume"]), str(content["id"]))
    except FileNotFoundError:
        raise StateError(f"{folder} is no state folder: it has no {STATE_FILE}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is damaged: {error}") from None
    if version > FORMAT:
        raise StateError(f"{folder} has format {version}, of a newer deltapool; this one reads up to {FORMAT}: upgrade")
    return volume


def _volume(folder: pathlib.Path, name: str) -> Volume:
    if (folder / STATE_FILE).exists():
        found = read_volume(folder)
        if found.name != name:
            raise StateError(
                f"{folder} holds the volume {found.name!r}, not {name!r}: give --volume {found.name} or another --state"
            )
        return found
    volume = Volume(name, str(uuid.uuid4()))
    for number in range(LIVE_DIRECTORIES):
        (folder / LIVE_FOLDER / f"{number:02x}").mkdir(parents=True, exist_ok=True, mode=0o700)
    new = folder / f"{STATE_FILE}.new"
    with open(new, "w") as file:
        json.dump({"format": FORMAT, "volume": volume.name, "id": volume.id}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, folder / STATE_FILE)
    for path in (folder, folder / "live"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
    return volume
