"""Starting the fs process: checks first, then in the foreground, or in the background with a log file.

The background process is started by exec, not by fork, with its working directory in the state folder. It tells
through a pipe that it answers, or why it does not.
"""

import contextlib
import dataclasses
import logging
import logging.handlers
import os
import pathlib
import select
import subprocess
import sys

from deltapool.fs import config, state, unmount
from deltapool.fs.errors import StateError, UserError

READY = b"ready\n"
START_SECONDS = 600.0  # recovery reads what was dirty: seconds for gigabytes
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FREE_BYTES_LEAST = 16 << 20  # to make a volume
FREE_BYTES_TO_REMOVE = 3 << 19  # to mount one and remove files: the namespace's log


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is to be mounted where. Paths are absolute."""

    mountpoint: pathlib.Path
    folder: pathlib.Path
    volume: str
    config: pathlib.Path | None

    @classmethod
    def make(
        cls, directory: pathlib.Path, folder: pathlib.Path | None, volume: str | None, config: pathlib.Path | None
    ) -> "Request":
        mountpoint = (
            pathlib.Path(os.path.realpath(directory.parent)) / directory.name
            if directory.name
            else pathlib.Path(os.path.abspath(directory))
        )
        if directory.name in ("", ".", ".."):
            mountpoint = pathlib.Path(os.path.realpath(directory))
        if volume is None and folder is not None and (folder / state.STATE_FILE).exists():
            volume = state.read_volume(folder).name
        if volume is None:
            volume = state.default_volume(mountpoint)
        state.check_volume_name(volume)
        folder = folder or state.default_folder(volume, dict(os.environ))
        return cls(
            mountpoint,
            pathlib.Path(os.path.realpath(folder)),
            volume,
            pathlib.Path(os.path.abspath(config)) if config else None,
        )

    def arguments(self) -> list[str]:
        words = ["mount", str(self.mountpoint), "--state", str(self.folder), "--volume", self.volume]
        return [*words, "--config", str(self.config)] if self.config else words


def in_background(request: Request) -> None:
    """Starts the fs process and returns when the mount answers. Raises UserError with its reason if it does not."""
    prepare(request)
    _read_config(request)
    opened = state.open_state(request.folder, request.volume)
    opened.close()
    log_folder = request.folder / state.LOG_FOLDER
    log_folder.mkdir(mode=0o700, exist_ok=True)
    reading, writing = os.pipe()
    with open(log_folder / state.LOG_FILE, "ab") as log_file:
        child = subprocess.Popen(
            [sys.executable, "-m", "deltapool.fs.cli", *request.arguments(), "--ready-fd", str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            pass_fds=[writing],
            cwd=request.folder,
            start_new_session=True,
        )
    os.close(writing)
    said = _listen(reading)
    if said == READY:
        return
    code = child.wait()
    reason = (
        said.decode(errors="replace").strip()
        or f"it ended with {code} before it answered; see {log_folder / state.LOG_FILE}"
    )
    raise UserError(reason)


def _listen(reading: int) -> bytes:
    said = b""
    with open(reading, "rb", buffering=0) as pipe:
        while said != READY:
            if not select.select([pipe], [], [], START_SECONDS)[0]:
                raise UserError(f"it did not answer within {START_SECONDS:g} s, and goes on trying; the log has more")
            data = pipe.read(4096)
            if not data:
                break
            said += data
    return said


def in_foreground(request: Request, ready_fd: int | None) -> None:
    """Serves until the filesystem is unmounted. With `ready_fd`, logs to the state folder and reports through that
    descriptor."""
    from deltapool.fs import mount

    def tell(message: bytes) -> None:
        if ready_fd is not None:
            os.write(ready_fd, message)
            os.close(ready_fd)

    try:
        if ready_fd is None:
            prepare(request)
        settings = _read_config(request)
        opened = state.open_state(request.folder, request.volume)
        try:
            _log_to(request.folder if ready_fd is not None else None, settings.limits)
            os.chdir(request.folder)
            mount.serve(opened, request.mountpoint, settings, lambda: tell(READY))
        finally:
            opened.close()
    except UserError as error:
        if ready_fd is not None:
            try:
                tell(f"{error}\n".encode())
            except OSError:
                logging.getLogger(__name__).error("%s", error)
            sys.exit(1)
        raise


def prepare(request: Request) -> None:
    """Checks what can be checked before anything is made, clears a dead mount, and makes the mountpoint. Raises
    UserError."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing = not os.path.exists("/dev/fuse")
        raise UserError(
            "/dev/fuse is missing: load the fuse module" if missing else "/dev/fuse cannot be opened by this user"
        )
    unmount.fusermount("-V")
    mountpoint = request.mountpoint
    mounted = unmount.mounted_at(mountpoint)
    if mounted is not None:
        if unmount.answers(mountpoint):
            raise UserError(f"{mountpoint} is mounted already, from {mounted.state}")
        complaint = unmount.fusermount("-uz", str(mountpoint))
        if complaint is not None:
            raise UserError(f"{mountpoint} holds a dead mount that could not be cleared: {complaint}")
    for what, path in (("state folder", request.folder), ("Python environment", pathlib.Path(sys.prefix))):
        if path == mountpoint or mountpoint in path.parents:
            raise UserError(f"the {what} {path} would lie inside the mount {mountpoint}; put it elsewhere")
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
        entries = os.listdir(mountpoint)
    except FileExistsError:
        raise UserError(f"{mountpoint} is no folder") from None
    except OSError as error:
        raise UserError(f"{mountpoint}: {error.strerror}") from None
    if entries:
        raise UserError(f"{mountpoint} is not empty ({entries[0]!r}): mounting would hide what is there")
    _check_space(request.folder)


def _check_space(folder: pathlib.Path) -> None:
    """A volume that has filled its disk must still be mounted: how else would its files be removed?"""
    here, needed = folder, FREE_BYTES_LEAST
    if (folder / state.STATE_FILE).exists():
        needed = FREE_BYTES_TO_REMOVE
        with contextlib.suppress(FileNotFoundError):  # left by a daemon that was killed, with what it had reserved
            needed -= os.stat(folder / f"{state.NAMESPACE_FILE}-wal").st_blocks * 512
    while not here.exists():
        here = here.parent
    found = os.statvfs(here)
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise StateError(f"the disk of {folder} is full: {free} bytes are free, {needed} are needed to mount")


def _read_config(request: Request) -> config.Config:
    if request.config is None:
        return config.defaults()
    try:
        text = request.config.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{request.config}: {error}") from None
    return config.parse(text, str(request.config))


def _log_to(folder: pathlib.Path | None, limits: config.Limits) -> None:
    handler: logging.Handler
    if folder is None:
        handler = logging.StreamHandler()
    else:
        path = folder / state.LOG_FOLDER / state.LOG_FILE
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=limits.log_bytes, backupCount=limits.log_files)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])
