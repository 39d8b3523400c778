"""Deltas: one change to a journal's bytes, as a value and as a record. `replay` makes journals from them.

A `Delta` holds steps that lead from a journal's content to its next one, and the length and the digest of the result.
A delta that is `born` begins with nothing, or with the first bytes of another journal. `docs/format.md` has the
layout of a record. `encode` and `Decoder` do no I/O: bytes in, values or NEED_MORE out.

Damage is found before anything is believed. The header has a check of its own, so a damaged length is damage, and not
a record that seems to go on; the checksum at the end covers the whole record. Damage is for the caller to count and to
name. Where a record's header is sound the next one can still be found; a lost delta then shows as a mismatch in its
journal, and in no other. Every value has exactly one encoding.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

from deltapool.cas.digest import DIGEST_BYTES, Read
from deltapool.cas.wire import Cursor, Malformed, varint
from deltapool.fs.extents import AppendRange, Change, PatchRange
from deltapool.fs.fold import Replacement

MAGIC: Final = 0xDE
VERSION: Final = 1
HEADER_BYTES: Final = 10
CHECKSUM_BYTES: Final = 8
HAS_BORN: Final = 0x01
HAS_PARENT: Final = 0x02
RECORD_BYTES_MAX: Final = 16 << 20
STEPS_MAX: Final = 8192


class StepKind(enum.IntEnum):
    APPEND = 1
    PATCH = 2
    TRUNCATE = 3
    KEEP = 4


@dataclass(frozen=True, slots=True)
class Append:
    data: bytes


@dataclass(frozen=True, slots=True)
class Patch:
    """Overwrite; never past the end."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    """As ftruncate: downwards, or upwards with zeros."""

    length: int


@dataclass(frozen=True, slots=True)
class Keep:
    """content := content[:at] + content[start : start + length], with at <= start. A head trim has at = 0."""

    at: int
    start: int
    length: int


Step = Append | Patch | Truncate | Keep


@dataclass(frozen=True, slots=True)
class Born:
    """The journal begins here, with the first `prefix_length` bytes of the parent's present content."""

    path: bytes  # provisional: names come with a cut
    mode: int
    parent: int | None = None
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    inode: int
    mtime_ns: int
    born: Born | None
    steps: tuple[Step, ...]
    length_after: int
    digest_after: bytes


class DamagedRecord(Exception):
    """What stands at `position` is no record. `next_position` is where the next one begins, if that is known."""

    def __init__(self, position: int, reason: str, next_position: int | None) -> None:
        super().__init__(f"damaged record at {position}: {reason}")
        self.position, self.reason, self.next_position = position, reason, next_position


class NeedMore(enum.Enum):
    NEED_MORE = "the record goes on in bytes that were not fed yet"


NEED_MORE: Final = NeedMore.NEED_MORE


# Making deltas.


def steps_of(changes: Iterable[Change], read: Read) -> tuple[Step, ...]:
    """The steps for a plan of `extents.Pending`, with the bytes of the live file."""
    steps: list[Step] = []
    for change in changes:
        if isinstance(change, AppendRange):
            steps.append(Append(_bytes(read, change)))
        elif isinstance(change, PatchRange):
            steps.append(Patch(change.start, _bytes(read, change)))
        else:
            steps.append(Truncate(change.length))
    return tuple(steps)


def steps_of_replacement(replacement: Replacement, appended: bytes) -> tuple[int, tuple[Step, ...]]:
    """The `prefix_length` of a journal born from the one it replaces, and the steps that follow.

    `appended` is the beginning of the replacement's appended bytes, or all of them.
    """
    prefix_length, steps = replacement.prefix, list[Step]()
    if replacement.keep is not None:
        start, length = replacement.keep
        prefix_length = start + length
        steps.append(Keep(replacement.prefix, start, length))
    if appended:
        steps.append(Append(appended))
    return prefix_length, tuple(steps)


def _bytes(read: Read, run: AppendRange | PatchRange) -> bytes:
    data = read(run.start, run.end - run.start)
    if len(data) != run.end - run.start:
        raise EOFError(f"{len(data)} bytes of [{run.start}, {run.end}): the journal is shorter than what was noted")
    return data


# The codec.


def encode(delta: Delta, record_bytes_max: int = RECORD_BYTES_MAX) -> bytes:
    """The record of a delta. ValueError if it is no delta that `Decoder` would return, or too large."""
    if len(delta.steps) > STEPS_MAX or len(delta.digest_after) != DIGEST_BYTES:
        raise ValueError(f"no delta: {len(delta.steps)} steps, a digest of {len(delta.digest_after)} bytes")
    born = delta.born
    body = [bytes((0 if born is None else HAS_BORN | (0 if born.parent is None else HAS_PARENT),))]
    body += varint(delta.inode), varint(_zigzag(delta.mtime_ns))
    if born is not None:
        body += varint(len(born.path)), born.path, varint(born.mode)
        if born.parent is not None:
            body += varint(born.parent), varint(born.prefix_length)
        elif born.prefix_length:
            raise ValueError("a prefix of no parent")
    body.append(varint(len(delta.steps)))
    for step in delta.steps:
        match step:
            case Append(data):
                body += bytes((StepKind.APPEND,)), varint(len(data)), data
            case Patch(offset, data):
                body += bytes((StepKind.PATCH,)), varint(offset), varint(len(data)), data
            case Truncate(length):
                body += bytes((StepKind.TRUNCATE,)), varint(length)
            case Keep(at, start, length):
                body += bytes((StepKind.KEEP,)), varint(at), varint(start), varint(length)
    body += varint(delta.length_after), delta.digest_after
    size = sum(map(len, body))
    if HEADER_BYTES + size + CHECKSUM_BYTES > record_bytes_max:
        raise ValueError(f"a delta of {size} bytes exceeds the record limit of {record_bytes_max}")
    record = b"".join((_header(size), *body))
    return record + xxhash.xxh3_64_digest(record)


class Decoder:
    """A stream of records -> deltas. Feed what there is, then call `next` until it says NEED_MORE."""

    def __init__(self, record_bytes_max: int = RECORD_BYTES_MAX, position: int = 0) -> None:
        self.position = position
        """Where the next record begins in the stream. What was fed from here on has not been returned."""
        self._record_bytes_max = record_bytes_max
        self._buffer = bytearray()
        self._begin = 0  # of the next record, in the buffer
        self._damage: DamagedRecord | None = None

    @property
    def buffered_bytes(self) -> int:
        """At the end of the stream, not zero means a torn record."""
        return len(self._buffer) - self._begin

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if self._begin:
            del self._buffer[: self._begin]
            self._begin = 0
        self._buffer += data

    def next(self) -> Delta | Literal[NeedMore.NEED_MORE]:
        """DamagedRecord is raised once for a record whose end is known, then the next one follows; else for ever."""
        if self._damage is not None:
            raise self._damage
        if self.buffered_bytes < HEADER_BYTES:
            return NEED_MORE
        size = self._record_bytes()
        if self.buffered_bytes < size:
            return NEED_MORE
        position = self.position
        with memoryview(self._buffer)[self._begin : self._begin + size] as record:
            self.position += size
            self._begin += size
            try:
                return _decode(record)
            except Malformed as error:
                raise DamagedRecord(position, str(error), self.position) from None

    def _record_bytes(self) -> int:
        header = bytes(self._buffer[self._begin : self._begin + HEADER_BYTES])
        body_bytes = int.from_bytes(header[2:6], "big")
        size = HEADER_BYTES + body_bytes + CHECKSUM_BYTES
        if header != _header(body_bytes, header[1]):
            reason = "its header is not sound"
        elif size > self._record_bytes_max:
            reason = f"its {size} bytes exceed the limit of {self._record_bytes_max}"
        else:
            return size
        self._damage = DamagedRecord(self.position, reason, None)
        raise self._damage


def _decode(record: memoryview) -> Delta:
    if xxhash.xxh3_64_digest(record[:-CHECKSUM_BYTES]) != record[-CHECKSUM_BYTES:]:
        raise Malformed("its checksum does not match")
    if record[1] != VERSION:
        raise Malformed(f"it is of version {record[1]}, and this reader knows {VERSION}")
    cursor = Cursor(record[HEADER_BYTES:-CHECKSUM_BYTES])
    flags = cursor.byte()
    if flags not in (0, HAS_BORN, HAS_BORN | HAS_PARENT):
        raise Malformed(f"unknown flags {flags:#04x}")
    inode, mtime_ns = cursor.varint(), _unzigzag(cursor.varint())
    born = None
    if flags & HAS_BORN:
        path, mode = cursor.bytes(cursor.varint()), cursor.varint()
        born = Born(path, mode)
        if flags & HAS_PARENT:
            born = Born(path, mode, cursor.varint(), cursor.varint())
    count = cursor.varint()
    if count > STEPS_MAX:
        raise Malformed(f"{count} steps exceed the limit of {STEPS_MAX}")
    steps = tuple(_decode_step(cursor) for _ in range(count))
    delta = Delta(inode, mtime_ns, born, steps, cursor.varint(), cursor.bytes(DIGEST_BYTES))
    cursor.end()
    return delta


def _decode_step(cursor: Cursor) -> Step:
    match cursor.byte():
        case StepKind.APPEND:
            return Append(cursor.bytes(cursor.varint()))
        case StepKind.PATCH:
            return Patch(cursor.varint(), cursor.bytes(cursor.varint()))
        case StepKind.TRUNCATE:
            return Truncate(cursor.varint())
        case StepKind.KEEP:
            return Keep(cursor.varint(), cursor.varint(), cursor.varint())
        case kind:
            raise Malformed(f"unknown step {kind}")


def _header(body_bytes: int, version: int = VERSION) -> bytes:
    fields = bytes((MAGIC, version)) + body_bytes.to_bytes(4, "big")
    return fields + xxhash.xxh3_64_digest(fields)[:4]


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unzigzag(value: int) -> int:
    return value >> 1 if not value & 1 else -(value + 1 >> 1)
