"""Live files: the bytes of inode 42 are in `live/2a/42` under the state folder, in the clear.

While a file that was truncated to nothing is being rewritten, its new bytes are in `42.new` and the old ones stay in
`42`, until the new ones are durable and `promote` renames them over the old. A crash before that finds the old
content, one after it the new.

System calls only, on paths and descriptors; who may call them when is decided above. Methods named `sync_*` and
`promote` wait for a disk and belong in a thread; the others are called on the loop. OSError comes through as it is.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import resource
from collections.abc import Callable, Iterable, Iterator

from deltapool.fs.inode import Ino
from deltapool.fs.state import LIVE_DIRECTORIES, LIVE_FOLDER

NEW = ".new"
BLOCK_BYTES = 1 << 20
SPARE_DESCRIPTORS = 256  # for everything else
OPEN_MIN = 64


def relative_path(ino: Ino, *, new: bool = False) -> str:
    """Where the bytes of `ino` are, below `live/`."""
    return f"{ino % LIVE_DIRECTORIES:02x}/{ino}{NEW if new else ''}"


class LiveFile:
    """An open live file. `users` counts threads that are using the descriptor; it is closed when the last one is
    done."""

    __slots__ = ("_closed", "_closing", "fd", "ino", "is_new", "users")

    def __init__(self, ino: Ino, fd: int, *, is_new: bool, closed: Callable[[], None] = lambda: None) -> None:
        """`closed` is called when the descriptor has been."""
        self._closed = closed
        self.ino = ino
        self.fd = fd
        self.is_new = is_new
        self.users = 0
        self._closing = False

    def read_now(self, offset: int, size: int) -> bytes | None:
        """Up to `size` bytes if the page cache has them; None if a disk would have to be waited for."""
        buffer = bytearray(size)
        try:
            count = os.preadv(self.fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return None
            raise
        if count == size:
            return bytes(buffer)
        # Short: the end of the file, or the end of what is cached. Asking for one byte more tells.
        if os.fstat(self.fd).st_size > offset + count:
            return None
        return bytes(memoryview(buffer)[:count])

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file. May wait for a disk."""
        data = os.pread(self.fd, size, offset)
        while 0 < len(data) < size:
            more = os.pread(self.fd, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def has_nuls(self) -> bool:
        """Reads until it meets one. Belongs in a thread."""
        at = 0
        while block := os.pread(self.fd, BLOCK_BYTES, at):
            if b"\0" in block:
                return True
            at += len(block)
        return False

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Writes `data` and returns how much of it: less only if the disk filled up on the way. Raises OSError if
        nothing was written."""
        done = os.pwrite(self.fd, data, offset)
        with contextlib.suppress(OSError):
            while done < len(data):
                done += os.pwrite(self.fd, memoryview(data)[done:], offset + done)
        return done

    def truncate(self, length: int) -> None:
        os.ftruncate(self.fd, length)

    def set_times(self, atime_ns: int, mtime_ns: int) -> None:
        os.utime(self.fd, ns=(atime_ns, mtime_ns))

    def stat(self) -> os.stat_result:
        return os.fstat(self.fd)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[int]:
        """The descriptor stays open meanwhile, whatever happens to the inode."""
        self.users += 1
        try:
            yield self.fd
        finally:
            self.users -= 1
            if self._closing and not self.users:
                self._close()

    def close(self) -> None:
        if self.users:
            self._closing = True
        else:
            self._close()

    def _close(self) -> None:
        os.close(self.fd)
        self._closed()


class LiveStore:
    """The folder `live/` of one state folder."""

    def __init__(self, state: pathlib.Path, open_max: int) -> None:
        """At most `open_max` live files are kept open, and at most as many as this process may."""
        self.folder = state / LIVE_FOLDER
        self._root = f"{self.folder}/"
        self.rewriting: set[Ino] = set()  # those whose present bytes are in `.new`
        self.fresh: set[Ino] = set()  # those whose present name in the folder may not be durable
        self.needed: set[Ino] = set()  # those that have no inode any more, but whose bytes are still looked at
        self.open_files = 0
        possible = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        self.open_max = max(OPEN_MIN, min(open_max, possible))
        self.make_room: Callable[[], None] = lambda: None  # told to close some when so many are open

    def path(self, ino: Ino, *, new: bool = False) -> str:
        return self._root + relative_path(ino, new=new)

    def create(self, ino: Ino) -> LiveFile:
        live = self._open(ino, os.O_CREAT | os.O_EXCL, new=False)
        self.fresh.add(ino)
        return live

    def open(self, ino: Ino) -> LiveFile:
        return self._open(ino, 0, new=ino in self.rewriting)

    def _open(self, ino: Ino, flags: int, *, new: bool) -> LiveFile:
        if self.open_files >= self.open_max:
            self.make_room()
        fd = os.open(self.path(ino, new=new), os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        self.open_files += 1
        return LiveFile(ino, fd, is_new=new, closed=self._one_closed)

    def _one_closed(self) -> None:
        self.open_files -= 1

    def stat(self, ino: Ino) -> os.stat_result:
        return os.stat(self.path(ino, new=ino in self.rewriting))

    def begin_rewrite(self, ino: Ino) -> LiveFile:
        """A new, empty live file beside the old one, which stays."""
        live = self._open(ino, os.O_CREAT | os.O_TRUNC, new=True)
        self.rewriting.add(ino)
        return live

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_files(self, files: Iterable[tuple[Ino, bool]]) -> None:
        """Makes bytes and times of these live files durable, of the new one where the flag is set. Those that were
        removed or promoted meanwhile are left out."""
        for ino, new in files:
            try:
                fd = os.open(self.path(ino, new=new), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_folder(self, ino: Ino) -> None:
        """Makes the names of the live files beside that of `ino` durable."""
        fd = os.open(f"{self._root}{ino % LIVE_DIRECTORIES:02x}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def promote(self, ino: Ino) -> None:
        """The new bytes, already durable, take the place of the old ones. A single rename: cheap, but durable only
        after `sync_folder`."""
        os.rename(self.path(ino, new=True), self.path(ino))
        self.rewriting.discard(ino)
        self.fresh.add(ino)

    def remove(self, ino: Ino) -> None:
        """Frees the bytes of `ino`, those of both generations; it is no error if there are none."""
        for new in (False, True):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(ino, new=new))

    def sync_all(self) -> None:
        """Makes every live file, old and new, and every name durable: one syncfs of the folder's filesystem."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _syncfs(fd)
        finally:
            os.close(fd)


def _syncfs(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
