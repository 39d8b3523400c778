"""A pinned content, read by the mover: the live file, and over it what the undo log has saved since the pin.

The live file is read first and the log looked at then (`undo` says why that is enough). A live file whose path leads to
another content by now has a link in `kept/`, which is made before the path changes: so after opening a file by its path
it is asked once more whether that link is there.
"""

import errno
import os
import pathlib

from deltapool.cas.messages import Job
from deltapool.cas.undo import UndoIndex

NEW = ".new"
READ_BYTES = 8 << 20


class UndoLog:
    """The files of an undo log, and how far they have been read."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._index = UndoIndex()
        self._read: dict[int, int] = {}
        self._files: dict[int, int] = {}

    def refresh(self, first: int) -> None:
        """Takes in what was appended to files from number `first` on."""
        present = sorted(int(name) for name in os.listdir(self._folder) if name.isdigit())
        for number in [number for number in self._files if number not in present]:
            os.close(self._files.pop(number))
            self._read.pop(number, None)
        if present:
            self._index.forget_before(present[0])
        for number in present:
            if number >= first:
                self._feed(number)

    def _feed(self, number: int) -> None:
        if number not in self._files:
            try:
                self._files[number] = os.open(self._folder / str(number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        at = self._read.setdefault(number, 0)
        while data := os.pread(self._files[number], READ_BYTES, at):
            taken = self._index.feed(number, at, data)
            if not taken:
                break
            at += taken
        self._read[number] = at

    def apply(self, ino: int, position: tuple[int, int], start: int, buffer: bytearray) -> list[tuple[int, int]]:
        """Puts what is saved over the bytes of the live file. The ranges that were."""
        done = []
        for saved in self._index.overlay(ino, position, start, start + len(buffer)):
            data = os.pread(self._files[saved.file], saved.end - saved.start, saved.at)
            if len(data) != saved.end - saved.start:
                raise EOFError(f"the undo log ends within a record of inode {ino}")
            buffer[saved.start - start : saved.end - start] = data
            done.append((saved.start, saved.end))
        return done

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


class PinnedContent:
    """Raises FileNotFoundError if its live file is gone."""

    def __init__(self, state: pathlib.Path, job: Job, log: UndoLog) -> None:
        self._job = job
        self._log = log
        self._fd = _open(state, job)

    def close(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes of the pinned content. EOFError if some of them are nowhere."""
        buffer = bytearray(size)
        found = 0
        while found < size:
            try:
                count = os.preadv(self._fd, [memoryview(buffer)[found:]], offset + found)
            except OSError as error:
                raise EOFError(f"the live file of inode {self._job.ino} cannot be read: {error}") from error
            if not count:
                break
            found += count
        self._log.refresh(self._job.undo[0])
        saved = self._log.apply(self._job.ino, self._job.undo, offset, buffer)
        if found < size and not _covered(offset + found, offset + size, saved):
            raise EOFError(f"the live file of inode {self._job.ino} is shorter than it was")
        return bytes(buffer)

    def next_data(self, offset: int) -> int:
        """Up to where there are only zeros, for certain: holes of a live file of which nothing is saved."""
        try:
            end = os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            end = min(os.fstat(self._fd).st_size, self._job.length)
        end = min(end, self._job.length)
        if end <= offset:
            return offset
        self._log.refresh(self._job.undo[0])
        probe = bytearray(min(end - offset, READ_BYTES))
        while True:
            if self._log.apply(self._job.ino, self._job.undo, offset, probe):
                return offset
            if offset + len(probe) >= end:
                return end
            return offset + len(probe)


def _open(state: pathlib.Path, job: Job) -> int:
    kept, flags = state / job.kept, os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(kept, flags)
    except FileNotFoundError:
        pass
    try:
        fd = os.open(state / job.path, flags)
    except FileNotFoundError:
        fd = os.open(state / job.path.removesuffix(NEW), flags) if job.path.endswith(NEW) else -1
        if fd < 0:
            return os.open(kept, flags)
    try:
        other = os.open(kept, flags)
    except FileNotFoundError:
        return fd
    os.close(fd)
    return other


def _covered(start: int, end: int, ranges: list[tuple[int, int]]) -> bool:
    for first, last in sorted(ranges):
        if first > start:
            return False
        start = max(start, last)
        if start >= end:
            return True
    return start >= end
