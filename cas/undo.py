"""The undo log: bytes of live files as they were before they were overwritten. `docs/format.md` has the record.

The log is a sequence of files, numbered upwards, to which records are appended. A content that was pinned at a position
of the log is, for each byte, the first record at or after that position which covers it; where there is none, the live
file. Whoever overwrites writes the record first, whole; whoever reads reads the live file first, and looks for records
then. So a reader needs no lock: what he read of the live file before a record of it was there is what was pinned.

Pure: bytes in, values out. A record that is not there to its end ends what can be read for now.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import xxhash

_FIELDS: Final = struct.Struct("<QQI")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
RECORD_BYTES_MAX: Final = 1 << 20


class Saved(NamedTuple):
    """Old bytes of one inode: [start, end) of its content lies in the log's file `file` from `at` on."""

    start: int
    end: int
    file: int
    at: int


def encode(ino: int, offset: int, data: bytes) -> bytes:
    """One record."""
    if not 0 < len(data) <= RECORD_BYTES_MAX:
        raise ValueError(f"a record has 1 to {RECORD_BYTES_MAX} bytes, not {len(data)}")
    fields = _FIELDS.pack(ino, offset, len(data))
    return b"".join((fields, _CHECK.pack(_checksum(fields, data)), data))


def _checksum(fields: bytes, data: bytes) -> int:
    state = xxhash.xxh3_64(fields)
    state.update(data)
    return state.intdigest() & 0xFFFFFFFF


class UndoIndex:
    """Where in the log the records of each inode are. Fed file by file, from the begin of each."""

    def __init__(self) -> None:
        self._records: dict[int, list[Saved]] = {}

    def feed(self, file: int, at: int, data: bytes) -> int:
        """Takes in the records that `data`, which begins at `at` in that file, holds whole. How many bytes they
        take; the rest is to be given again, with what follows."""
        done = 0
        while len(data) - done >= HEADER_BYTES:
            ino, offset, length = _FIELDS.unpack_from(data, done)
            (check,) = _CHECK.unpack_from(data, done + _FIELDS.size)
            body = done + HEADER_BYTES
            if not 0 < length <= RECORD_BYTES_MAX or len(data) < body + length:
                break
            if _checksum(data[done : done + _FIELDS.size], data[body : body + length]) != check:
                break
            self._records.setdefault(ino, []).append(Saved(offset, offset + length, file, at + body))
            done = body + length
        return done

    def overlay(self, ino: int, position: tuple[int, int], start: int, end: int) -> Iterator[Saved]:
        """What is saved of [start, end) since `position`, in an order in which later ones are written over by what
        comes after: the first record that covers a byte comes last."""
        for saved in reversed(self._records.get(ino, ())):
            if (saved.file, saved.at - HEADER_BYTES) < position:
                return
            first, last = max(start, saved.start), min(end, saved.end)
            if first < last:
                yield Saved(first, last, saved.file, saved.at + first - saved.start)

    def forget_before(self, file: int) -> None:
        """Records in files below this number are needed no longer."""
        for ino in list(self._records):
            left = [saved for saved in self._records[ino] if saved.file >= file]
            if left:
                self._records[ino] = left
            else:
                del self._records[ino]
