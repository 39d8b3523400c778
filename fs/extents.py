"""What has changed in a journal since it was last shipped, as ranges of its live file. No bytes are held here.

Let S be the length that was shipped. Since then the live file was truncated, really, to K <= S at the lowest, and now
has the length L >= K. Then the shipped content and the present one differ in three places, and nowhere else:

    0 ............ K ............. S
    [   kept      )[ gone         )           shipped
    [  patched?   )[ appended ......... L)    present

Below K only what was written there differs (`patched`). From K on everything is new, whatever was there before: even
where the same bytes came back, a truncation that really happened has been paid for. Folding (`fold`) sees to it that
one happens only where bytes differ. So three steps, in this order, lead from one to the other: truncate to K, patch,
append. A hole in the appended part is a truncation upwards: an agent that makes a sparse file does not ship zeros.

Everything is bounded: too many patches and the nearest are merged, equal bytes between them included; too many holes
and the smallest are shipped as zeros.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from deltapool.cas.digest import SEGMENT_BYTES

RANGES_MAX = 1024
HOLE_BYTES_MIN = 4096
SLICE_BYTES_MIN = 2 * SEGMENT_BYTES


class Extents:
    """A set of byte positions, kept as sorted half-open ranges that do not touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def __repr__(self) -> str:
        return f"Extents({list(self)})"

    @property
    def total_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        _check(start, end)
        if start == end:
            return
        first = bisect_left(self._ends, start)  # the first range that ends at or after start, so touches or follows
        last = bisect_right(self._starts, end)  # the first range that begins after end
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        _check(start, end)
        if start == end:
            return
        first = bisect_right(self._ends, start)  # the first range that ends after start
        last = bisect_left(self._starts, end)  # the first range that begins at or after end
        if first >= last:
            return
        head, tail = self._starts[first], self._ends[last - 1]
        left = [(head, start)] if head < start else []
        right = [(end, tail)] if end < tail else []
        self._starts[first:last] = [s for s, _ in left + right]
        self._ends[first:last] = [e for _, e in left + right]

    def clip(self, length: int) -> None:
        """Drop every position at or beyond `length`."""
        _check(0, length)
        count = bisect_left(self._starts, length)
        del self._starts[count:], self._ends[count:]
        if count:
            self._ends[-1] = min(self._ends[-1], length)

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()

    def merge_nearest(self, count: int) -> None:
        """Fill the smallest gaps until at most `count` ranges are left."""
        if count < 1:
            raise ValueError("ranges can't be merged to fewer than one")
        surplus = len(self) - count
        if surplus <= 0:
            return
        gaps = sorted(range(1, len(self)), key=lambda at: self._starts[at] - self._ends[at - 1])
        filled = set(gaps[:surplus])
        self._starts = [start for at, start in enumerate(self._starts) if at not in filled]
        self._ends = [end for at, end in enumerate(self._ends) if at + 1 not in filled]

    def drop_smallest(self, count: int) -> None:
        """Forget the smallest ranges until at most `count` are left."""
        surplus = len(self) - count
        if surplus <= 0:
            return
        sizes = sorted(range(len(self)), key=lambda at: self._ends[at] - self._starts[at])
        dropped = set(sizes[:surplus])
        self._starts = [start for at, start in enumerate(self._starts) if at not in dropped]
        self._ends = [end for at, end in enumerate(self._ends) if at not in dropped]


@dataclass(frozen=True, slots=True)
class TruncateTo:
    """As ftruncate: downwards, or upwards with zeros."""

    length: int


@dataclass(frozen=True, slots=True)
class PatchRange:
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AppendRange:
    """`start` is the length at that point."""

    start: int
    end: int


Change = TruncateTo | PatchRange | AppendRange


@dataclass(frozen=True, slots=True)
class Slice:
    """Changes that lead to the first `length_after` bytes of the live file."""

    changes: tuple[Change, ...]
    length_after: int


class Pending:
    """What has changed in one journal since the state that was last noted. Tell it only what was done on disk."""

    __slots__ = ("_holes", "_ranges_max", "kept_length", "length", "patched", "shipped_length")

    def __init__(self, shipped_length: int = 0, ranges_max: int = RANGES_MAX) -> None:
        if ranges_max < 1:
            raise ValueError("ranges_max is at least one")
        self.shipped_length = self.kept_length = self.length = shipped_length
        self.patched = Extents()
        self._holes = Extents()  # in [kept_length, length), never written since they were made
        self._ranges_max = ranges_max

    @property
    def changed(self) -> bool:
        return self.kept_length < max(self.shipped_length, self.length) or bool(self.patched)

    @property
    def intact_length(self) -> int:
        """How many of the first bytes are those of the state that was last noted, for certain."""
        return next((start for start, _ in self.patched), self.kept_length)

    @property
    def ship_bytes(self) -> int:
        """The bytes that shipping would read, holes apart: never less than what it does read."""
        return self.patched.total_bytes + self.length - self.kept_length

    def written(self, start: int, end: int) -> None:
        """[start, end) was written; a gap before it is a hole."""
        _check(start, end)
        if start == end:
            return
        if start < self.kept_length:
            self.patched.add(start, min(end, self.kept_length))
            if len(self.patched) > self._ranges_max:
                self.patched.merge_nearest(_fewer(self._ranges_max))
        if start > self.length:
            self.extended(start)
        elif self._holes:
            self._holes.remove(start, end)
            self._bound_holes()
        self.length = max(self.length, end)

    def extended(self, length: int) -> None:
        """The file was truncated upwards."""
        if length < self.length:
            raise ValueError(f"{length} is no extension of {self.length}")
        self._holes.add(self.length, length)
        self._bound_holes()
        self.length = length

    def truncated(self, length: int) -> None:
        """The file was truncated downwards."""
        if not 0 <= length <= self.length:
            raise ValueError(f"{length} is no truncation of {self.length}")
        self.length = length
        self.kept_length = min(self.kept_length, length)
        self.patched.clip(self.kept_length)
        self._holes.clip(length)

    def noted(self) -> None:
        """The plan was noted and will be shipped whatever happens: start anew from the present state."""
        self.shipped_length = self.kept_length = self.length
        self.patched.clear()
        self._holes.clear()

    def plan(self) -> tuple[Change, ...]:
        """The changes, in the order in which a delta makes them. Their bytes are those of the live file now."""
        patches = tuple(PatchRange(start, end) for start, end in self.patched)
        return self._cut_back(self.kept_length) + patches + self._tail(self.kept_length)

    def slices(self, bytes_max: int) -> tuple[Slice, ...]:
        """The same plan in slices that carry at most `bytes_max` bytes each, for records of bounded size.

        Each slice but the last ends where a segment of the digest ends, so that its result can be proved by digests
        that are known anyway. Patches too large for one slice are shipped as the content from the first of them on.
        """
        if bytes_max < SLICE_BYTES_MIN:
            raise ValueError(f"slices have at least {SLICE_BYTES_MIN} bytes")
        target = bytes_max - SEGMENT_BYTES  # the rest is for reaching the end of a segment
        kept, patches = self.kept_length, tuple(self.patched)
        if self.patched.total_bytes > target:
            kept, patches = patches[0][0], ()
        slices: list[Slice] = []
        changes: list[Change] = [*self._cut_back(kept), *(PatchRange(start, end) for start, end in patches)]
        room = target - sum(end - start for start, end in patches)
        at = kept
        for run in self._tail(kept):
            hole = isinstance(run, TruncateTo)
            run_end = run.length if isinstance(run, TruncateTo) else run.end
            while not (hole and room > 0) and (stop := _segment_end(at + max(room, 0))) < run_end:
                if at < stop:
                    changes.append(TruncateTo(stop) if hole else AppendRange(at, stop))
                slices.append(Slice(tuple(changes), stop))
                changes, room, at = [], target, stop
            changes.append(TruncateTo(run_end) if hole else AppendRange(at, run_end))
            room -= 0 if hole else run_end - at
            at = run_end
        if changes:
            slices.append(Slice(tuple(changes), self.length))
        return tuple(slices)

    def _cut_back(self, kept: int) -> tuple[Change, ...]:
        return (TruncateTo(kept),) if kept < self.shipped_length else ()

    def _tail(self, start: int) -> tuple[TruncateTo | AppendRange, ...]:
        tail: list[TruncateTo | AppendRange] = []
        for hole_start, hole_end in self._holes:
            if hole_end - hole_start < HOLE_BYTES_MIN:
                continue
            if start < hole_start:
                tail.append(AppendRange(start, hole_start))
            tail.append(TruncateTo(hole_end))
            start = hole_end
        if start < self.length:
            tail.append(AppendRange(start, self.length))
        return tuple(tail)

    def _bound_holes(self) -> None:
        if len(self._holes) > self._ranges_max:
            self._holes.drop_smallest(_fewer(self._ranges_max))


def _check(start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise ValueError(f"[{start}, {end}) is no range")


def _fewer(ranges_max: int) -> int:
    """Some room below the limit, so that sorting is paid for once in a while and not by every write."""
    return ranges_max - ranges_max // 4


def _segment_end(position: int) -> int:
    return -(-position // SEGMENT_BYTES) * SEGMENT_BYTES
