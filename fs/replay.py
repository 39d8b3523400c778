"""`apply`: the only code that makes a journal's content from deltas, live and in replay. All or nothing.

First it works out where every byte of the result comes from (`_Layout`), and refuses steps that are out of bounds.
Then it digests that result, reading through the layout: only the segments that the delta touches, the others are
known. If that isn't the digest that the delta promises, it says so, and nothing was written: a content is always what
was proved last. Only then is the layout laid down.

Laying down needs no second copy, because bytes of the old content only ever move towards the beginning, and never
change their order: going upwards, nothing is overwritten that is still wanted. What follows the last of them is zeros
and bytes that the delta brings.

What can't be undone is an error of the content while it is laid down (a full disk, a killed process). It is then
neither the old nor the new one, and has to be made again from where it was proved last; applying again won't do.
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from deltapool.cas.digest import (
    SEGMENT_BYTES,
    ZERO_SEGMENT_DIGEST,
    SegmentDigests,
    journal_digest,
    segment_digest,
    segments_touched,
)
from deltapool.fs.delta import Append, Delta, Keep, Patch, Step, Truncate

LENGTH_MAX: Final = 1 << 40


class Content(Protocol):
    """A journal's bytes. Reads return all that was asked for, writes write all, or they raise."""

    @property
    def length(self) -> int: ...

    @property
    def digests(self) -> SegmentDigests:
        """Told of every write and truncation by the content itself."""
        ...

    def read(self, offset: int, size: int) -> bytes: ...

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """A gap before `offset` reads as zeros."""
        ...

    def truncate(self, length: int) -> None:
        """Downwards, or upwards with zeros."""
        ...


class ReplayMismatch(Exception):
    """The delta does not fit this content. Nothing was changed; the content is still what was proved last."""

    def __init__(self, inode: int, reason: str) -> None:
        super().__init__(f"delta of inode {inode}: {reason}")
        self.inode, self.reason = inode, reason


def apply(delta: Delta, content: Content, parent: Content | None = None, length_max: int = LENGTH_MAX) -> None:
    """Change the content as the delta says and prove the result, or raise ReplayMismatch and change nothing.

    `parent` is given exactly if the delta is born of one. Lengths above `length_max` are refused, also in between.
    """
    try:
        layout = _lay_out(delta, content, parent, length_max)
        if layout.length != delta.length_after:
            raise _Refused(f"it makes {layout.length} bytes and promises {delta.length_after}")
        digests = b"".join(layout.segment_digests(content, parent))
        if (digest := journal_digest((digests,))) != delta.digest_after:
            raise _Refused(f"the result has digest {digest.hex()} and not {delta.digest_after.hex()}")
    except _Refused as error:
        raise ReplayMismatch(delta.inode, str(error)) from None
    layout.lay_down(content, parent)
    assert content.length == delta.length_after, "a content that does not do as it is told"
    content.digests.settle(delta.length_after, digests)


class _Refused(Exception):
    pass


def _lay_out(delta: Delta, content: Content, parent: Content | None, length_max: int) -> "_Layout":
    layout = _Layout(content.length)
    if delta.born is not None:
        if content.length:
            raise _Refused(f"it is born, but there are {content.length} bytes already")
        if (delta.born.parent is None) != (parent is None) or parent is content:
            raise ValueError(f"not the parent of this delta, which is {delta.born.parent}")
        prefix, available = delta.born.prefix_length, 0 if parent is None else parent.length
        if prefix > available:
            raise _Refused(f"it begins with {prefix} bytes of a parent that has {available}")
        layout.push(_Piece(_Source.PARENT, 0, prefix))
    elif parent is not None:
        raise ValueError("a parent of a delta that is not born")
    for number, step in enumerate(delta.steps):
        if not layout.step(step, length_max):
            raise _Refused(f"step {number}, {type(step).__name__}, is out of bounds of {layout.length} bytes")
    return layout


class _Source(enum.Enum):
    BASE = "the content as it was"
    PARENT = "the parent's content"
    DATA = "the delta"
    ZEROS = "nowhere"


@dataclass(frozen=True, slots=True)
class _Piece:
    source: _Source
    offset: int
    length: int
    data: bytes = b""

    def part(self, start: int, end: int) -> "_Piece":
        return _Piece(self.source, self.offset + start, end - start, self.data)

    def read(self, content: Content, parent: Content | None) -> bytes | memoryview:
        match self.source:
            case _Source.BASE:
                return content.read(self.offset, self.length)
            case _Source.PARENT:
                assert parent is not None
                return parent.read(self.offset, self.length)
            case _Source.DATA:
                return memoryview(self.data)[self.offset : self.offset + self.length]
            case _Source.ZEROS:
                return bytes(self.length)


class _Layout:
    """Where each byte of a content to be comes from: pieces, one after the other, none empty."""

    def __init__(self, base_length: int) -> None:
        self.length = 0
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []
        self.push(_Piece(_Source.BASE, 0, base_length))

    def push(self, piece: _Piece) -> None:
        if piece.length:
            self._starts.append(self.length)
            self._pieces.append(piece)
            self.length += piece.length

    def step(self, step: Step, length_max: int) -> bool:
        """False, and nothing done, if the step is out of bounds."""
        match step:
            case Append(data):
                if self.length + len(data) > length_max:
                    return False
                self.push(_Piece(_Source.DATA, 0, len(data), data))
            case Patch(offset, data):
                if offset + len(data) > self.length:
                    return False
                if data:
                    first, last = self._split(offset), self._split(offset + len(data))
                    self._pieces[first:last] = [_Piece(_Source.DATA, 0, len(data), data)]
                    self._starts[first:last] = [offset]
            case Truncate(length):
                if length > length_max:
                    return False
                if length < self.length:
                    self._cut(length)
                self.push(_Piece(_Source.ZEROS, 0, length - self.length))
            case Keep(at, start, length):
                if not at <= start <= start + length <= self.length:
                    return False
                self._cut(start + length)
                first, last = self._split(at), self._split(start)
                del self._pieces[first:last], self._starts[first:last]
                self._starts[first:] = [begin - (start - at) for begin in self._starts[first:]]
                self.length = at + length
        return True

    def _split(self, at: int) -> int:
        """The number of the piece that begins at `at`, which is made to."""
        if at >= self.length:
            return len(self._pieces)
        number = bisect_right(self._starts, at) - 1
        inside = at - self._starts[number]
        if inside:
            piece = self._pieces[number]
            self._pieces[number : number + 1] = [piece.part(0, inside), piece.part(inside, piece.length)]
            self._starts.insert(number + 1, at)
            return number + 1
        return number

    def _cut(self, length: int) -> None:
        count = self._split(length)
        del self._pieces[count:], self._starts[count:]
        self.length = length

    def _covering(self, start: int, end: int) -> Iterator[_Piece]:
        number = bisect_right(self._starts, start) - 1
        while start < end:
            piece, begin = self._pieces[number], self._starts[number]
            stop = min(end, begin + piece.length)
            yield piece.part(start - begin, stop - begin)
            number, start = number + 1, stop

    def segment_digests(self, content: Content, parent: Content | None) -> Iterator[bytes]:
        """The digests of the result. What is known is not read."""
        for index in segments_touched(0, self.length):
            start = index * SEGMENT_BYTES
            end = min(start + SEGMENT_BYTES, self.length)
            pieces = list(self._covering(start, end))
            known = _known(index, pieces[0], content, parent) if len(pieces) == 1 else None
            if known is None:
                known = segment_digest(b"".join(_read(piece, content, parent) for piece in pieces))
            yield known

    def lay_down(self, content: Content, parent: Content | None) -> None:
        laid = list(zip(self._starts, self._pieces, strict=True))
        moved = next((n for n in range(len(laid), 0, -1) if laid[n - 1][1].source is _Source.BASE), 0)
        for start, piece in laid[:moved]:
            assert piece.source is not _Source.BASE or start <= piece.offset, "old bytes only move to the beginning"
            _place(start, piece, content, parent)
        kept = laid[moved - 1][0] + laid[moved - 1][1].length if moved else 0
        if content.length > kept:
            content.truncate(kept)
        for start, piece in laid[moved:]:
            _place(start, piece, content, parent)
        if content.length < self.length:
            content.truncate(self.length)


def _known(index: int, piece: _Piece, content: Content, parent: Content | None) -> bytes | None:
    """The digest of a segment that consists of this piece, if it is one that was digested before."""
    if piece.source is _Source.ZEROS:
        return ZERO_SEGMENT_DIGEST if piece.length == SEGMENT_BYTES else None
    source = {_Source.BASE: content, _Source.PARENT: parent}.get(piece.source)
    if source is None or piece.offset != index * SEGMENT_BYTES:
        return None
    if piece.length != min(SEGMENT_BYTES, source.length - piece.offset):
        return None
    return source.digests.known(index)


def _read(piece: _Piece, content: Content, parent: Content | None) -> bytes | memoryview:
    data = piece.read(content, parent)
    if len(data) != piece.length:
        raise EOFError(f"{len(data)} bytes instead of {piece.length}, from {piece.source.value}")
    return data


def _place(start: int, piece: _Piece, content: Content, parent: Content | None) -> None:
    if piece.source is _Source.ZEROS or (piece.source is _Source.BASE and piece.offset == start):
        return
    for at in range(0, piece.length, SEGMENT_BYTES):
        part = piece.part(at, min(at + SEGMENT_BYTES, piece.length))
        content.write(start + at, _read(part, content, parent))


class MemoryContent:
    """A content in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.digests = SegmentDigests(len(data))

    @property
    def length(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset > len(self.data):
            self.truncate(offset)
        self.data[offset : offset + len(data)] = data
        self.digests.written(offset, offset + len(data))

    def truncate(self, length: int) -> None:
        del self.data[length:]
        self.data.extend(bytes(length - len(self.data)))
        self.digests.truncated(length)

    def digest(self) -> bytes:
        self.digests.complete(self.read)
        return self.digests.digest()
