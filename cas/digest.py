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

    Tell it of every change, before or after it is made. `complete` reads what is not known, and nothing else; then ask
    `digest`. Segments that a truncation upwards filled with zeros are known without being read. It takes 16 bytes for
    each segment, so a hole of 1 TiB takes 16 MiB.
    """

    __slots__ = ("_digests", "_unknown", "length")

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self._digests = bytearray()  # one after the other; may end before the journal does: the rest is unknown
        self._unknown: set[int] = set()  # of those that are there

    def copy(self) -> "SegmentDigests":
        other = SegmentDigests(self.length)
        other._digests, other._unknown = self._digests[:], set(self._unknown)
        return other

    @property
    def _covered(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    def known(self, index: int) -> bytes | None:
        if index >= self._covered or index in self._unknown:
            return None
        return bytes(self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def learn(self, index: int, digest: bytes) -> None:
        """The segment with this number has this digest now."""
        covered = self._covered
        if index < covered:
            self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest
            self._unknown.discard(index)
            return
        if index > covered:
            self._unknown.update(range(covered, index))
            self._digests.extend(bytes(DIGEST_BYTES * (index - covered)))
        self._digests.extend(digest)

    def written(self, start: int, end: int) -> None:
        """[start, end) was written; a gap before it reads as zeros."""
        if start >= end:
            return
        if start > self.length:
            self.truncated(start)
        touched = segments_touched(start, end)
        self._unknown.update(range(touched.start, min(touched.stop, self._covered)))
        self.length = max(self.length, end)

    def truncated(self, length: int) -> None:
        """The journal was truncated to `length`, downwards or (with zeros) upwards."""
        if length < self.length:
            self._keep(length // SEGMENT_BYTES)
        elif length > self.length:
            self._keep(self.length // SEGMENT_BYTES)  # at most a partial segment, which now goes on
            first, covered = -(-self.length // SEGMENT_BYTES), self._covered
            zeros = length // SEGMENT_BYTES - first
            if zeros > 0:
                self._unknown.update(range(covered, first))
                self._digests.extend(bytes(DIGEST_BYTES * (first - covered)))
                self._digests.extend(ZERO_SEGMENT_DIGEST * zeros)
        self.length = length

    def _keep(self, count: int) -> None:
        if count < self._covered:
            del self._digests[count * DIGEST_BYTES :]
            self._unknown = {index for index in self._unknown if index < count}

    def settle(self, length: int, digests: bytes) -> None:
        """Replace all: these, one after the other, are those of all segments of a journal that now has this length."""
        if len(digests) != DIGEST_BYTES * len(segments_touched(0, length)):
            raise ValueError(f"{len(digests)} bytes of segment digests do not cover {length} bytes")
        self.length, self._digests, self._unknown = length, bytearray(digests), set()

    def complete(self, read: Read) -> list[int]:
        """Reads the segments that are not known, each in one piece. Their numbers, ascending."""
        missing = [*sorted(self._unknown), *range(self._covered, len(segments_touched(0, self.length)))]
        for index in missing:
            size = min(SEGMENT_BYTES, self.length - index * SEGMENT_BYTES)
            data = read(index * SEGMENT_BYTES, size)
            if len(data) != size:
                raise EOFError(f"segment {index}: {len(data)} bytes instead of {size}: the journal became shorter")
            self.learn(index, segment_digest(data))
        return missing

    def digest(self, prefix: int | None = None) -> bytes:
        """The digest of the journal, or of its first `prefix` bytes if that is a whole number of segments. All that it
        is made of must be known."""
        end = self.length if prefix is None else prefix
        if end != self.length and (end % SEGMENT_BYTES or not 0 <= end < self.length):
            raise ValueError(f"no prefix of whole segments of {self.length} bytes: {prefix}")
        count = len(segments_touched(0, end))
        if count > self._covered or any(index < count for index in self._unknown):
            raise ValueError("not all of these segments are known")
        with memoryview(self._digests) as view:
            return xxhash.xxh3_128_digest(view[: count * DIGEST_BYTES])
