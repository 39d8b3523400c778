"""The digest of a journal: what a replay proves its result by.

A journal grows by a line and is then digested again, so the digest must not cost the length of the journal. It is taken
in two steps: xxh3-128 of each 1 MiB segment (the last one may be shorter), then xxh3-128 of those digests, one after
the other. A change rehashes the segments that it touches and 16 bytes for each of the others. Empty content has no
segments; its digest is xxh3-128 of nothing.

xxh3 finds accidents. It is no identity: whoever wants to forge content with a given digest can.
"""

from collections.abc import Callable, Iterable

import xxhash

SEGMENT_BYTES = 1 << 20
DIGEST_BYTES = 16

Read = Callable[[int, int], bytes]
"""(offset, size) -> exactly that many bytes."""


def segment_digest(data: bytes | memoryview) -> bytes:
    """The xxh3-128 of one segment, canonical (big-endian)."""
    return xxhash.xxh3_128_digest(data)


ZERO_SEGMENT_DIGEST = segment_digest(bytes(SEGMENT_BYTES))


def journal_digest(segments: Iterable[bytes]) -> bytes:
    """The digest of the content whose segments have these digests, in order."""
    joined = b"".join(segments)
    if len(joined) % DIGEST_BYTES:
        raise ValueError(f"{len(joined)} bytes are no sequence of {DIGEST_BYTES}-byte digests")
    return xxhash.xxh3_128_digest(joined)


def digest_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """The journal digest of content that is in memory."""
    with memoryview(data) as view:
        starts = range(0, len(view), SEGMENT_BYTES)
        return journal_digest(segment_digest(view[start : start + SEGMENT_BYTES]) for start in starts)


def segments_touched(start: int, end: int) -> range:
    """The numbers of the segments that share a byte with [start, end)."""
    if not 0 <= start <= end:
        raise ValueError(f"[{start}, {end}) is no range")
    if start == end:
        return range(0)
    return range(start // SEGMENT_BYTES, (end - 1) // SEGMENT_BYTES + 1)


class SegmentDigests:
    """The segment digests of one journal, as far as they are known; a change forgets those that it touches.

    Tell it of every change, before or after it is made, then ask `digest`. It reads what it does not know, and nothing
    else. Segments that a truncation upwards filled with zeros are known without being read.
    """

    __slots__ = ("_known", "length")

    def __init__(self, length: int = 0, known: Iterable[bytes | None] = ()) -> None:
        self.length = length
        self._known: list[bytes | None] = list(known)  # may be shorter than the journal: the rest is unknown
        if len(self._known) > len(segments_touched(0, length)):
            raise ValueError(f"{len(self._known)} segment digests are too many for {length} bytes")

    def known(self, index: int) -> bytes | None:
        return self._known[index] if index < len(self._known) else None

    def written(self, start: int, end: int) -> None:
        """[start, end) was written; a gap before it reads as zeros."""
        if start >= end:
            return
        if start > self.length:
            self.truncated(start)
        for index in segments_touched(start, end):
            if index >= len(self._known):
                break
            self._known[index] = None
        self.length = max(self.length, end)

    def truncated(self, length: int) -> None:
        """The journal was truncated to `length`, downwards or (with zeros) upwards."""
        if length <= self.length:
            if length < self.length:
                del self._known[length // SEGMENT_BYTES :]
        else:
            del self._known[self.length // SEGMENT_BYTES :]  # at most a partial segment, which now goes on
            first = -(-self.length // SEGMENT_BYTES)
            zeros = length // SEGMENT_BYTES - first
            if zeros > 0:
                self._known.extend([None] * (first - len(self._known)))
                self._known.extend([ZERO_SEGMENT_DIGEST] * zeros)
        self.length = length

    def settle(self, length: int, known: Iterable[bytes]) -> None:
        """Replace all: these are the digests of all segments of a journal that now has this length."""
        self.length, self._known = length, list(known)
        if len(self._known) != len(segments_touched(0, length)):
            raise ValueError(f"{len(self._known)} segment digests do not cover {length} bytes")

    def segments(self, read: Read) -> tuple[bytes, ...]:
        """The digests of all segments. Those unknown are read, each in one piece, and remembered."""
        count = len(segments_touched(0, self.length))
        self._known.extend([None] * (count - len(self._known)))
        digests = tuple(
            self._read(read, index) if digest is None else digest for index, digest in enumerate(self._known)
        )
        self._known[:] = digests
        return digests

    def digest(self, read: Read, prefix: int | None = None) -> bytes:
        """The digest of the journal, or of its first `prefix` bytes if that is a whole number of segments."""
        if prefix is None or prefix == self.length:
            return journal_digest(self.segments(read))
        if prefix % SEGMENT_BYTES or not 0 <= prefix < self.length:
            raise ValueError(f"no prefix of whole segments of {self.length} bytes: {prefix}")
        return journal_digest(self.segments(read)[: prefix // SEGMENT_BYTES])

    def _read(self, read: Read, index: int) -> bytes:
        size = min(SEGMENT_BYTES, self.length - index * SEGMENT_BYTES)
        data = read(index * SEGMENT_BYTES, size)
        if len(data) != size:
            raise EOFError(f"segment {index}: {len(data)} bytes instead of {size}: the journal is shorter than noted")
        return segment_digest(data)
