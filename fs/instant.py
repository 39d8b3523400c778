"""One instant of a journal as values, and what is found out about it. Pure but for the reads that it is given."""

from collections.abc import Callable
from dataclasses import dataclass

from deltapool.cas.digest import SEGMENT_BYTES, Read, SegmentDigests, journal_digest
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
    known: tuple[bytes | None, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    digests: tuple[bytes, ...]
    lines: tuple[int, ...]
    nuls: bool  # whether a NUL was among the bytes read
    replacement: Replacement | None

    @property
    def digest(self) -> bytes:
        return journal_digest(self.digests)


def examine(instant: Instant, read: Read, read_ancestor: Read | None) -> Findings:
    """Digests and line counts of the instant: only segments that changed are read. With an ancestor, what was
    taken over from it.

    Raises EOFError if the file is shorter than the instant says: it was truncated meanwhile."""
    counted: dict[int, int] = {}
    nuls: list[bool] = []

    def counting(offset: int, size: int) -> bytes:
        data = read(offset, size)
        counted[offset // SEGMENT_BYTES] = data.count(b"\n")
        nuls.append(b"\0" in data)
        return data

    found = SegmentDigests(instant.length, instant.known).segments(counting)
    lines = tuple(counted.get(i, instant.lines[i] if i < len(instant.lines) else 0) for i in range(len(found)))
    return Findings(found, lines, any(nuls), _replacement(instant, read, read_ancestor))


def _replacement(instant: Instant, read: Read, read_ancestor: Read | None) -> Replacement | None:
    """None if nothing can be said: bytes of the ancestor (who has it open may truncate it) or ours have gone."""
    ancestor = instant.ancestor
    if ancestor is None or read_ancestor is None or instant.length < ancestor.own_length:
        return None
    try:
        return compare_replacement(ancestor.length, ancestor.own_length, read_ancestor, read)
    except EOFError:
        return None
