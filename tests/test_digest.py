"""The journal digest: its definition, and that a change rehashes its own segments only."""

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.digest import (
    SEGMENT_BYTES,
    ZERO_SEGMENT_DIGEST,
    SegmentDigests,
    digest_bytes,
    journal_digest,
    segment_digest,
    segments_touched,
)

reproducible = settings(derandomize=True, database=None, deadline=None)


class Reader:
    """Content that remembers which segments were read."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.segments: list[int] = []

    def __call__(self, offset: int, size: int) -> bytes:
        self.segments.append(offset // SEGMENT_BYTES)
        return bytes(self.data[offset : offset + size])


def completed(digests: SegmentDigests, reader: Reader) -> SegmentDigests:
    assert digests.complete(reader) == reader.segments
    return digests


def test_empty_content_has_the_digest_of_nothing() -> None:
    assert digest_bytes(b"") == journal_digest([]) == xxhash.xxh3_128_digest(b"")
    assert digest_bytes(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_digests_are_canonical() -> None:
    assert segment_digest(b"journal") == xxhash.xxh3_128_intdigest(b"journal").to_bytes(16, "big")
    assert segment_digest(bytes(SEGMENT_BYTES)) == ZERO_SEGMENT_DIGEST


@pytest.mark.parametrize("length", [1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES])
def test_the_digest_is_that_of_the_digests_of_the_segments(length: int) -> None:
    data = (b"0123456789abcdef" * (length // 16 + 1))[:length]
    segments = [data[at : at + SEGMENT_BYTES] for at in range(0, length, SEGMENT_BYTES)]
    expected = xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(segment) for segment in segments))
    assert digest_bytes(data) == digest_bytes(memoryview(data)) == digest_bytes(bytearray(data)) == expected
    assert completed(SegmentDigests(length), Reader(data)).digest() == expected


def test_what_is_no_sequence_of_digests_is_refused() -> None:
    with pytest.raises(ValueError, match="no sequence"):
        journal_digest([b"short"])


@pytest.mark.parametrize(
    ("start", "end", "touched"),
    [
        (0, 0, []),
        (5, 5, []),
        (0, 1, [0]),
        (0, SEGMENT_BYTES, [0]),
        (SEGMENT_BYTES - 1, SEGMENT_BYTES + 1, [0, 1]),
        (SEGMENT_BYTES, 3 * SEGMENT_BYTES, [1, 2]),
    ],
)
def test_segments_touched(start: int, end: int, touched: list[int]) -> None:
    assert list(segments_touched(start, end)) == touched


def test_no_range_touches_nothing() -> None:
    with pytest.raises(ValueError, match="no range"):
        segments_touched(2, 1)


def test_an_append_rehashes_the_last_segment_only() -> None:
    data = bytearray(b"x" * (5 * SEGMENT_BYTES + 7))
    digests = SegmentDigests(len(data))
    digests.complete(Reader(data))
    digests.written(len(data), len(data) + 5)
    data += b"line\n"
    assert digests.complete(Reader(data)) == [5]
    assert digests.digest() == digest_bytes(data)


def test_a_hole_is_known_without_being_read() -> None:
    digests = SegmentDigests(10)
    digests.truncated(1 << 34)
    data = bytearray(b"0123456789")
    assert digests.complete(Reader(data + bytes(SEGMENT_BYTES - 10))) == [0]
    assert digests.known(1) == digests.known((1 << 14) - 1) == ZERO_SEGMENT_DIGEST
    assert digests.known(1 << 14) is None


def test_a_copy_is_not_told_of_what_comes_later() -> None:
    data = b"z" * (SEGMENT_BYTES + 1)
    digests = completed(SegmentDigests(len(data)), Reader(data))
    copy = digests.copy()
    digests.written(0, 1)
    assert digests.known(0) is None
    assert copy.known(0) == segment_digest(data[:SEGMENT_BYTES])
    assert copy.complete(Reader(b"")) == []


def test_what_is_learned_beyond_the_unknown_leaves_it_unknown() -> None:
    data = b"q" * (3 * SEGMENT_BYTES)
    digests = SegmentDigests(len(data))
    digests.learn(2, segment_digest(data[:SEGMENT_BYTES]))
    assert [digests.known(index) is None for index in range(3)] == [True, True, False]
    assert digests.complete(Reader(data)) == [0, 1]
    assert digests.digest() == digest_bytes(data)


def test_the_digest_of_a_prefix_is_made_of_known_segments() -> None:
    data = b"y" * (2 * SEGMENT_BYTES + 1)
    digests = completed(SegmentDigests(len(data)), Reader(data))
    assert digests.digest(2 * SEGMENT_BYTES) == digest_bytes(data[: 2 * SEGMENT_BYTES])
    assert digests.digest(len(data)) == digest_bytes(data)
    with pytest.raises(ValueError, match="whole segments"):
        digests.digest(17)
    digests.written(len(data) - 1, len(data))
    assert digests.digest(2 * SEGMENT_BYTES) == digest_bytes(data[: 2 * SEGMENT_BYTES])
    with pytest.raises(ValueError, match="not all"):
        digests.digest()


def test_a_journal_shorter_than_noted_is_an_error() -> None:
    with pytest.raises(EOFError, match="became shorter"):
        SegmentDigests(10).complete(Reader(b"123"))


def test_digests_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        SegmentDigests().settle(1, b"")


position = st.integers(0, 4 * SEGMENT_BYTES)
edge = st.builds(lambda segment, by: max(0, segment * SEGMENT_BYTES + by), st.integers(0, 4), st.integers(-2, 2))
place = st.one_of(position, edge)


@settings(reproducible, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), place, st.integers(0, 9)), max_size=6))
def test_known_digests_are_those_of_the_content(changes: list[tuple[bool, int, int]]) -> None:
    data, digests = bytearray(b"start"), SegmentDigests(5)
    for write, at, size in changes:
        if write:
            if size and at > len(data):
                data.extend(bytes(at - len(data)))
            data[at : at + size] = b"x" * size
            digests.written(at, at + size)
        else:
            del data[at:]
            data.extend(bytes(at - len(data)))
            digests.truncated(at)
        assert digests.length == len(data)
        assert completed(digests, Reader(data)).digest() == digest_bytes(data)
