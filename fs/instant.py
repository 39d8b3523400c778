"""One instant of a journal as values, and what is found out about it. Pure but for the reads that it is given."""

from collections.abc import Callable
from dataclasses import dataclass

from deltapool.cas.digest import SEGMENT_BYTES, Read, SegmentDigests
from deltapool.fs.extents import Pending
from deltapool.fs.fold import Replacement, compare_replacement


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The journal that another one was renamed over: compared when that one is noted, while its bytes are there."""

    ino: int
    length: int
    own_length: int  # of the other one, when it happened
    intact: Callable[[], int]
    """How many of its first bytes are still those that were noted last. Who has it open may write: it only shrinks."""


@dataclass(frozen=True, slots=True)
class Instant:
    """What is noted: one instant of one journal. `pending` is not told of anything later."""

    length: int
    mtime_ns: int
    pending: Pending
    born: bool  # nothing of this journal was noted before
    ancestor: Ancestor | None
    ancestor_intact: int  # the ancestor's `intact` at this instant
    digests: SegmentDigests  # those that were known then

    @property
    def kept_segments(self) -> int:
        """How many full segments, from the first one, were noted before and are there still, patched maybe."""
        return 0 if self.born else self.pending.kept_length // SEGMENT_BYTES


@dataclass(frozen=True, slots=True)
class Findings:
    digests: SegmentDigests  # all of them
    lines: dict[int, int]  # of each segment that was read
    nuls: bool  # whether a NUL was among the bytes read
    replacement: Replacement | None

    @property
    def whole_segments(self) -> list[tuple[int, bytes, int]]:
        """(number, digest, lines) of the full segments that were read."""
        whole = self.digests.length // SEGMENT_BYTES
        found = ((number, self.digests.known(number), lines) for number, lines in self.lines.items() if number < whole)
        return [(number, digest, lines) for number, digest, lines in found if digest is not None]


def examine(instant: Instant, read: Read, read_ancestor: Read | None) -> Findings:
    """Digests of the instant, and line counts of the segments that changed: only those are read. With an ancestor, what
    was taken over from it.

    Raises EOFError if the file is shorter than the instant says: it was truncated meanwhile."""
    lines: dict[int, int] = {}
    nuls: list[bool] = []

    def counting(offset: int, size: int) -> bytes:
        data = read(offset, size)
        lines[offset // SEGMENT_BYTES] = data.count(b"\n")
        nuls.append(b"\0" in data)
        return data

    digests = instant.digests.copy()
    digests.complete(counting)
    return Findings(digests, lines, any(nuls), _replacement(instant, read, read_ancestor))


def _replacement(instant: Instant, read: Read, read_ancestor: Read | None) -> Replacement | None:
    """None if nothing can be said: bytes of the ancestor (who has it open may truncate it) or ours have gone."""
    ancestor = instant.ancestor
    if ancestor is None or read_ancestor is None or instant.length < ancestor.own_length:
        return None
    try:
        return compare_replacement(ancestor.length, ancestor.own_length, read_ancestor, read)
    except EOFError:
        return None
