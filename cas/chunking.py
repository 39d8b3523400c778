"""Where a content is cut into chunks and holes.

A *hole* is a run of zeros of at least 64 KiB, whether somebody wrote them or nobody wrote anything. It begins at a
multiple of 4 KiB, and ends at one or with the content. What lies between holes is *data*. Data of a content of up to
256 KiB is not cut; longer data is cut by FastCDC, where a hash of the 64 bytes before a position says so. The sizes
depend on the length of the whole content (`sizes_for`).

Where the next cut lies depends on nothing but the bytes that follow the last one. So the cutter has no state but its
position; the same content is cut in the same way, whoever does it; and content that moved is cut as it was before, from
its second or third chunk on. That is also how a content is cut anew around its changes only:

    old     |    a    |  b  |     c     |   d   |  e  |     the cuts of the old recipe
    dirty                   xxxx
    new     |    a    |  b  |  p   |  q |   d   |  e  |     c is read, then as much as it takes

Cutting begins at the last old cut that no change can have moved: the begin of the piece that holds the first dirty byte
(a cut that a hole or the end of the content made goes with it, and the piece before is cut again). As soon as a cut
falls on an old one behind what is dirty, the pieces from there on are those that cutting would find: they are kept and
not read. If that does not come about within `resync_bytes`, as in content that repeats itself, the next old cut is made
a new one. But for that, and for zeros before a dirty range that are too few for a hole without it, the result is the
one that cutting from the beginning gives.

A content whose length crosses a step of `SIZES` is cut from the beginning: equal contents shall have equal chunks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pyfastcdc import FastCDC

from deltapool.cas.chunk import digest_of
from deltapool.cas.digest import Read
from deltapool.cas.recipe import Chunk, Entry, Hole, Recipe

NextData = Callable[[int], int]
"""offset -> an offset not before it, up to which all bytes are known to be zeros, as lseek(SEEK_DATA) says."""

HOLE_BYTES_MIN: Final = 64 << 10
BLOCK_BYTES: Final = 4 << 10
READ_BYTES: Final = 4 << 20
_PROBE_BYTES: Final = HOLE_BYTES_MIN // 2  # of any hole, at least one whole multiple of this is all zeros
_ZEROS: Final = bytes(HOLE_BYTES_MIN)
_BLOCK: Final = bytes(BLOCK_BYTES)
_PROBE: Final = bytes(_PROBE_BYTES)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How data is cut in contents of up to `length_max` bytes. Measured: docs/decisions/0009-chunk-sizes.md."""

    length_max: int
    average: int
    min: int
    max: int

    @property
    def window_bytes(self) -> int:
        """What has to be seen to make one cut: the longest chunk, and whether a hole begins in it."""
        return self.max + HOLE_BYTES_MIN

    @property
    def resync_bytes(self) -> int:
        return 4 * self.max


def _sizes(length_max: int, average: int) -> Sizes:
    return Sizes(length_max, average, average // 4, average * 4)


WHOLE_BYTES_MAX: Final = 256 << 10
SIZES: Final = (
    Sizes(WHOLE_BYTES_MAX, WHOLE_BYTES_MAX, WHOLE_BYTES_MAX, WHOLE_BYTES_MAX),
    _sizes(8 << 20, 8 << 10),
    _sizes(64 << 20, 64 << 10),
    _sizes(512 << 20, 128 << 10),
    _sizes(1 << 62, 1 << 20),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a content. `data` are the bytes of a chunk that was cut anew; what was kept has none."""

    offset: int
    entry: Entry
    data: bytes | None = None


def sizes_for(length: int) -> Sizes:
    return SIZES[bisect_left(SIZES, length, key=lambda sizes: sizes.length_max)]


def no_hole_known(offset: int) -> int:
    return offset


def rechunk(
    old: Recipe | None,
    length: int,
    dirty: Iterable[tuple[int, int]],
    read: Read,
    next_data: NextData = no_hole_known,
) -> Iterator[Piece]:
    """The pieces of a content of `length` bytes, in order and without gap.

    Outside of the `dirty` ranges, which are ascending, it is what `old` says, as far as both go. Without `old` all is
    dirty. The caller joins the entries (`recipe_of`) and stores the data of those chunks that the pool does not have.
    """
    if old is None or sizes_for(old.length) != sizes_for(length):
        old = Recipe()
    cutter = _Cutter(old, length, _joined(old, length, dirty), read, next_data)
    kept = 0  # the next old piece to be kept
    for start, _ in cutter.dirty:
        if start < cutter.position:
            continue  # it was cut together with one before
        first = _restart(old, start)
        yield from _keep(old, kept, first)
        cutter.position = old.starts[first] if old.entries else 0
        while cutter.position < length:
            yield cutter.piece()
            resumed = cutter.in_step()
            if resumed is not None:
                kept = resumed
                break
        else:
            return
    yield from _keep(old, kept, bisect_left(old.starts, length))


def _keep(old: Recipe, first: int, last: int) -> Iterator[Piece]:
    return (Piece(old.starts[at], old.entries[at]) for at in range(first, last))


def _joined(old: Recipe, length: int, dirty: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dirty ranges of the content: ascending, within it, apart, with what a change of the length does."""
    ranges = [(start, min(end, length)) for start, end in dirty if start < min(end, length)]
    if old.length < length:
        ranges.append((old.length, length))
    elif length < old.length and length and old.starts[old.index(length)] != length:
        ranges.append((length - 1, length))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(joined.pop()[1], end)
        joined.append((start, end))
    return joined


def _restart(old: Recipe, start: int) -> int:
    """The old piece to begin with if the first change is at `start`: the last begin that it can't have moved."""
    if not old.entries:
        return 0
    at = bisect_right(old.starts, min(start, old.length - 1)) - 1
    if isinstance(old.entries[at], Hole) and at and _floor(start) - old.starts[at] < HOLE_BYTES_MIN:
        at -= 1  # the hole may be gone, and with it the reason for the cut before it
    if isinstance(old.entries[at], Chunk) and at and isinstance(old.entries[at - 1], Hole):
        at -= 1  # it may become longer
    return at


def _floor(offset: int) -> int:
    return offset - offset % BLOCK_BYTES


class _Cutter:
    """Cuts the piece at `position`, and moves there."""

    __slots__ = ("_base", "_buffer", "_cdc", "_length", "_next_data", "_old", "_read", "_sizes", "dirty", "position")

    def __init__(self, old: Recipe, length: int, dirty: list[tuple[int, int]], read: Read, next_data: NextData) -> None:
        self.position, self.dirty = 0, dirty
        self._old, self._length, self._read, self._next_data = old, length, read, next_data
        self._sizes = sizes = sizes_for(length)
        self._cdc = FastCDC(sizes.average, min_size=sizes.min, max_size=sizes.max, normalized_chunking=1)
        self._buffer, self._base = b"", 0  # the content's bytes from there on

    def in_step(self) -> int | None:
        """The old piece to go on with, if cutting has come to an old cut and nothing needs to be cut for a while."""
        at = bisect_left(self._old.starts, self.position)
        if at == len(self._old.starts) or self._old.starts[at] != self.position:
            return None
        dirty_end, dirty_next = self._dirty_around(self.position)
        if dirty_end > self.position or (dirty_next is not None and _restart(self._old, dirty_next) <= at):
            return None
        return at

    def piece(self) -> Piece:
        at = self.position
        hole_end = self._known_hole_end(at)
        if hole_end is None:
            self._fill(at)
            limit = min(at + self._sizes.max, self._stop(at))
            hole = self._first_hole(at, min(at + self._sizes.window_bytes, self._length))
            if hole == at:
                hole_end = self._zeros_end(at)
            elif hole is not None:
                limit = min(limit, hole)
        if hole_end is not None:
            self.position = hole_end
            return Piece(at, Hole(hole_end - at))
        size = self._cut(at, limit)
        data = self._buffer[at - self._base : at - self._base + size]
        self.position = at + size
        return Piece(at, Chunk(digest_of(data), size), data)

    def _cut(self, at: int, limit: int) -> int:
        """The size of the chunk at `at`, which ends at the limit at the latest."""
        if limit - at <= self._sizes.min:
            return limit - at
        view = memoryview(self._buffer)[at - self._base : limit - self._base]
        return next(self._cdc.cut_buf(view)).length

    def _stop(self, at: int) -> int:
        """Where data is cut at the latest, so that cutting comes back to the old cuts."""
        dirty_end, dirty_next = self._dirty_around(at)
        index = bisect_left(self._old.starts, max(at + 1, dirty_end + self._sizes.resync_bytes))
        if index == len(self._old.starts) or (dirty_next is not None and _restart(self._old, dirty_next) <= index):
            return self._length  # none, or cutting could not end there
        return min(self._old.starts[index], self._length)

    def _dirty_around(self, at: int) -> tuple[int, int | None]:
        """The end of the last dirty range that begins before `at`, and the begin of the next one."""
        index = bisect_left(self.dirty, (at, 0))
        before = self.dirty[index - 1][1] if index else 0
        return before, self.dirty[index][0] if index < len(self.dirty) else None

    # Holes

    def _known_zeros(self, at: int) -> int:
        """Up to where there are only zeros, as far as is known without reading; as holes end."""
        end = max(at, min(self._next_data(at), self._length))
        dirty_end, dirty_next = self._dirty_around(at)
        if dirty_end <= at < min(self._old.length, self._length):
            index = self._old.index(at)
            if isinstance(entry := self._old.entries[index], Hole):
                clean = self._length if dirty_next is None else dirty_next
                end = max(end, min(self._old.starts[index] + entry.length, clean))
        return end if end == self._length else max(at, _floor(end))

    def _known_hole_end(self, at: int) -> int | None:
        if at % BLOCK_BYTES or (known := self._known_zeros(at)) - at < HOLE_BYTES_MIN:
            return None
        return self._zeros_end(known)

    def _zeros_end(self, at: int) -> int:
        """Where the hole ends that `at`, a multiple of 4 KiB or the end of the content, lies in."""
        while at < self._length:
            known = self._known_zeros(at)
            if known > at:
                at = known
                continue
            self._fill(at)
            size = min(HOLE_BYTES_MIN, self._length - at)
            if not self._buffer.startswith(_ZEROS[:size], at - self._base):
                while self._buffer.startswith(_BLOCK, at - self._base):
                    at += BLOCK_BYTES
                return at
            at += size
        return at

    def _first_hole(self, start: int, end: int) -> int | None:
        """Where the first hole begins in [start, end), which is in the buffer. What is cut off is none."""
        buffer, base = self._buffer, self._base
        probe = -(-start // _PROBE_BYTES) * _PROBE_BYTES
        while probe + _PROBE_BYTES <= end:
            if not buffer.startswith(_PROBE, probe - base):
                probe += _PROBE_BYTES
                continue
            first, last = probe, probe + _PROBE_BYTES
            while first - BLOCK_BYTES >= start and buffer.startswith(_BLOCK, first - BLOCK_BYTES - base):
                first -= BLOCK_BYTES
            while (
                last - first < HOLE_BYTES_MIN and last + BLOCK_BYTES <= end and buffer.startswith(_BLOCK, last - base)
            ):
                last += BLOCK_BYTES
            if end == self._length < last + BLOCK_BYTES and not any(buffer[last - base : end - base]):
                last = end
            if last - first >= HOLE_BYTES_MIN:
                return first
            probe += _PROBE_BYTES
        return None

    # The buffer

    def _fill(self, at: int) -> None:
        """Has at least a window from `at` on in the buffer, and reads ahead in what is dirty."""
        end = min(at + self._sizes.window_bytes, self._length)
        have_end = self._base + len(self._buffer)
        if self._base <= at and end <= have_end:
            return
        kept = self._buffer[at - self._base :] if self._base <= at <= have_end else b""
        start = at + len(kept)
        index = bisect_right(self.dirty, (start, self._length))
        dirty_end = self.dirty[index - 1][1] if index else 0
        size = min(max(end, min(dirty_end, start + READ_BYTES)), self._length) - start
        data = self._read(start, size)
        if len(data) != size:
            raise EOFError(f"{len(data)} bytes at {start} instead of {size}: the content became shorter")
        self._buffer, self._base = kept + data, at
