"""Cutting: whatever was changed, the pieces are the content; what did not change is neither read nor cut again."""

import hashlib
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.chunk import digest_of
from deltapool.cas.chunking import (
    BLOCK_BYTES,
    HOLE_BYTES_MIN,
    SIZES,
    WHOLE_BYTES_MAX,
    Piece,
    no_hole_known,
    rechunk,
    sizes_for,
)
from deltapool.cas.recipe import Chunk, Entry, Hole, Recipe, recipe_of

reproducible = settings(derandomize=True, database=None, deadline=None)
Range = tuple[int, int]
SMALL = sizes_for(1 << 20)


class Reader:
    """A content that remembers what was read of it."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.ranges: list[Range] = []

    def __call__(self, offset: int, size: int) -> bytes:
        assert size > 0
        self.ranges.append((offset, offset + size))
        return bytes(self.data[offset : offset + size])

    @property
    def total_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)


class Pool:
    """Chunks by digest, and what was new in the last content."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self.new: list[bytes] = []

    def store(self, pieces: Iterable[Piece]) -> Recipe:
        entries: list[Entry] = []
        self.new, at = [], 0
        for piece in pieces:
            assert piece.offset == at
            at += piece.entry.length
            entries.append(piece.entry)
            if piece.data is not None:
                assert isinstance(piece.entry, Chunk)
                assert piece.entry.digest == digest_of(piece.data)
                assert piece.entry.length == len(piece.data)
                if piece.entry.digest not in self.chunks:
                    self.chunks[piece.entry.digest] = piece.data
                    self.new.append(piece.data)
        return Recipe(tuple(entries))  # which refuses two holes in a row: they must have come as one

    def put(self, data: bytes) -> Recipe:
        return self.store(rechunk(None, len(data), (), Reader(data)))

    def content(self, recipe: Recipe) -> bytes:
        return b"".join(
            self.chunks[entry.digest] if isinstance(entry, Chunk) else bytes(entry.length) for entry in recipe.entries
        )


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# Cutting from the beginning


@pytest.mark.parametrize("length", [0, 1, 5000, WHOLE_BYTES_MAX])
def test_up_to_256_kib_is_one_chunk(length: int) -> None:
    data = noise(1, length)
    recipe = Pool().put(data)
    assert [entry.length for entry in recipe.entries] == ([length] if length else [])
    assert recipe.length == length


@pytest.mark.parametrize("length", [WHOLE_BYTES_MAX + 1, 3_000_000, 9_000_000, 70_000_000])
def test_more_is_cut_by_the_sizes_of_its_length(length: int) -> None:
    data, sizes = noise(2, length), sizes_for(length)
    reader, pool = Reader(data), Pool()
    recipe = pool.store(rechunk(None, length, (), reader))
    lengths = [entry.length for entry in recipe.entries]
    assert all(sizes.min <= size <= sizes.max for size in lengths[:-1])
    assert lengths[-1] <= sizes.max
    assert sizes.average / 2 < length / len(lengths) < sizes.average * 2
    assert pool.content(recipe) == data
    assert reader.total_bytes == length  # each byte once
    assert all(before[1] == after[0] for before, after in pairwise(reader.ranges))


def test_the_sizes_are_in_order() -> None:
    assert [sizes.length_max for sizes in SIZES] == sorted({sizes.length_max for sizes in SIZES})
    assert sizes_for(WHOLE_BYTES_MAX).length_max == WHOLE_BYTES_MAX
    assert sizes_for(WHOLE_BYTES_MAX + 1) == SIZES[1]
    assert all(sizes.min <= sizes.average <= sizes.max <= 4 << 20 for sizes in SIZES)


def test_cuts_stay_where_they_are() -> None:
    """Written down once: another release of the library, or other sizes, must not cut in other places."""
    found = hashlib.sha256()
    for length in (1 << 20, 9 << 20, 66 << 20):
        for entry in Pool().put(noise(3, length)).entries:
            found.update(entry.length.to_bytes(4, "big"))
    assert found.hexdigest() == "303f6f4de140a322aaa9114ed67ab85266a097499fbdf078844cb27a81971c1e"


def test_content_that_moved_is_cut_as_before() -> None:
    data, pool = noise(4, 2 << 20), Pool()
    pool.put(data)
    moved = b"inserted" * 1000 + data
    assert pool.content(pool.put(moved)) == moved
    assert sum(map(len, pool.new)) < 8000 + 4 * SMALL.max


def test_a_content_that_became_shorter_is_said() -> None:
    with pytest.raises(EOFError, match="became shorter"):
        list(rechunk(None, 11, (), lambda offset, size: b"0123456789"[offset : offset + size]))


# Holes


def holes(recipe: Recipe) -> list[Range]:
    return [
        (start, start + entry.length)
        for start, entry in zip(recipe.starts, recipe.entries, strict=True)
        if isinstance(entry, Hole)
    ]


KIB = 1024


@pytest.mark.parametrize(
    ("zeros", "expected"),
    [
        ([(0, 300)], [(0, 300)]),
        ([(100, 163)], []),
        ([(100, 164)], [(100, 164)]),
        ([(100, 168)], [(100, 168)]),
        ([(101, 165)], []),
        ([(101, 168)], [(104, 168)]),
        ([(101, 169)], [(104, 168)]),
        ([(0, 64), (65, 129), (130, 200)], [(0, 64), (132, 200)]),
        ([(200, 300)], [(200, 300)]),
        ([(239, 300)], []),
    ],
)
@pytest.mark.parametrize("kib", [256, 300])
def test_long_runs_of_zeros_are_holes(kib: int, zeros: list[Range], expected: list[Range]) -> None:
    data = bytearray(b"x" * (kib * KIB))
    for start, end in zeros:
        data[start * KIB : min(end, kib) * KIB] = bytes((min(end, kib) - start) * KIB)
    pool = Pool()
    recipe = pool.put(bytes(data))
    assert pool.content(recipe) == data
    if kib == 256:
        expected = [] if expected == [(200, 300)] else [(0, 256)] if expected == [(0, 300)] else expected
    assert holes(recipe) == [(start * KIB, end * KIB) for start, end in expected]


@pytest.mark.parametrize("tail", [0, 1, 4095])
def test_a_hole_ends_with_the_content(tail: int) -> None:
    length = HOLE_BYTES_MIN + 5 * BLOCK_BYTES + tail
    assert holes(Pool().put(bytes(length))) == [(0, length)]
    data = b"x" + bytes(length)
    assert holes(Pool().put(data)) == [(BLOCK_BYTES, len(data))]
    assert holes(Pool().put(bytes(length) + b"x")) == [(0, length - tail)]


def test_a_sparse_file_is_not_read() -> None:
    length, at = 1 << 40, 1 << 39
    reads: list[Range] = []

    def read(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return (bytes(max(0, at - offset)) + b"data")[max(0, offset - at) :][:size].ljust(size, b"\0")

    def next_data(offset: int) -> int:
        return offset if at <= offset < at + 4 else at if offset < at else length

    pieces = list(rechunk(None, length, (), read, next_data))
    assert pieces[0].entry.length == at
    assert sum(piece.entry.length for piece in pieces) == length
    assert len(pieces) <= 4
    assert sum(size for _, size in reads) < 40 << 20


def test_a_hole_that_is_known_is_the_hole_that_is_read() -> None:
    data = b"a" * 70_000 + bytes(3_000_000) + b"b" * 100_001 + bytes(70_000)

    def next_data(offset: int) -> int:
        return 3_050_000 if 80_001 < offset < 3_050_000 else offset

    reader = Reader(data)
    found = list(rechunk(None, len(data), (), reader, next_data))
    assert found == list(rechunk(None, len(data), (), Reader(data), no_hole_known))
    assert holes(recipe_of(piece.entry for piece in found)) == [(73_728, 3_067_904), (3_170_304, len(data))]


# Cutting anew around changes


def changed(data: bytearray, kind: str, at: int, size: int, seed: int) -> list[Range]:
    """Makes a change. The ranges that it made dirty, as a filesystem knows them."""
    if kind == "cut":
        del data[at:]
        return []
    if kind == "extend":
        data.extend(bytes(size))
        return []  # a longer content is dirty there without saying so
    new = noise(seed, size) if kind == "noise" else bytes(size)
    if at > len(data):
        data.extend(bytes(at - len(data)))
    data[at : at + size] = new
    return [(at, at + size)]


places = st.one_of(st.integers(0, 1_200_000), st.integers(0, 290).map(lambda block: block * BLOCK_BYTES))
amounts = st.one_of(st.integers(1, 200), st.sampled_from([4096, 65_536, 70_000, 131_072, 300_000]))
kinds = st.sampled_from(["noise", "noise", "zeros", "zeros", "cut", "extend"])
edits = st.lists(st.tuples(kinds, places, amounts, st.integers(0, 99)), min_size=1, max_size=6)


@settings(reproducible, max_examples=150)
@given(st.sampled_from([0, 1000, 300_000, 1_000_000]), st.lists(edits, min_size=1, max_size=3))
def test_whatever_is_changed_the_pieces_are_the_content(
    length: int, rounds: list[list[tuple[str, int, int, int]]]
) -> None:
    data, pool = bytearray(noise(5, length)), Pool()
    recipe = pool.put(bytes(data))
    for changes in rounds:
        before, old_length = bytes(data), len(data)
        dirty: list[Range] = []
        shortest = len(data)
        for kind, at, size, seed in changes:
            dirty += changed(data, kind, at, size, seed)
            shortest = min(shortest, len(data))
        if shortest < min(old_length, len(data)):  # cut off and written again
            dirty.append((shortest, len(data)))
        recipe = pool.store(rechunk(recipe, len(data), sorted(dirty), Reader(data)))
        assert recipe.length == len(data)
        assert pool.content(recipe) == data, (len(before), dirty)
        assert all(entry.length <= sizes_for(len(data)).max for entry in recipe.chunks())


@settings(reproducible, max_examples=150)
@given(st.integers(300_000, 900_000), st.lists(st.tuples(places, amounts, st.integers(0, 99)), max_size=5))
def test_cutting_around_changes_is_cutting_from_the_beginning(length: int, changes: list[tuple[int, int, int]]) -> None:
    data, pool, dirty = bytearray(noise(6, length)), Pool(), []
    old = pool.put(bytes(data))
    for at, size, seed in changes:
        at = min(at, len(data))
        dirty += changed(data, "noise", at, size, seed)
    reader = Reader(data)
    recipe = pool.store(rechunk(old, len(data), sorted(dirty), reader))
    assert recipe == Pool().put(bytes(data))
    reach = SMALL.resync_bytes + 2 * SMALL.max + SMALL.window_bytes
    for start, end in reader.ranges:
        assert any(first - 2 * SMALL.max <= start and end <= last + reach for first, last in _merged(dirty, 2 * reach))


def _merged(dirty: list[Range], gap: int) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(dirty):
        if merged and start <= merged[-1][1] + gap:
            start, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((start, end))
    return merged


def test_what_did_not_change_is_not_read() -> None:
    data, pool = bytearray(noise(7, 8 << 20)), Pool()
    old = pool.put(bytes(data))
    assert [piece.data for piece in rechunk(old, len(data), (), Reader(b""))] == [None] * len(old.entries)
    dirty = [(1_000_000, 1_000_010), (5_000_000, 5_004_096)]
    for start, end in dirty:
        data[start:end] = noise(8, end - start)
    reader = Reader(data)
    assert pool.content(pool.store(rechunk(old, len(data), dirty, reader))) == data
    assert len(pool.new) <= 6
    assert reader.total_bytes < 400_000


def test_an_append_reads_the_last_chunk_and_what_was_appended() -> None:
    data, pool = noise(9, 5 << 20), Pool()
    old = pool.put(data)
    data += noise(10, 10_000)
    reader = Reader(data)
    recipe = pool.store(rechunk(old, len(data), [(5 << 20, len(data))], reader))
    assert recipe == Pool().put(data)
    assert reader.ranges == [(old.starts[-1], len(data))]


def test_a_shorter_content_reads_its_last_chunk() -> None:
    data, pool = noise(11, 5 << 20), Pool()
    old = pool.put(data)
    middle = old.starts[100] + 77
    reader = Reader(data[:middle])
    assert pool.store(rechunk(old, middle, (), reader)) == Pool().put(data[:middle])
    assert reader.ranges == [(old.starts[100], middle)]
    edge = old.starts[100]
    assert pool.store(rechunk(old, edge, (), Reader(b""))).entries == old.entries[:100]


def test_a_hole_is_divided_without_being_read() -> None:
    length = 1 << 30
    old, at = Recipe((Hole(length),)), 500_000_001
    reader_ranges: list[Range] = []

    def read(offset: int, size: int) -> bytes:
        reader_ranges.append((offset, offset + size))
        return (
            bytes(max(0, at - offset)) + b"x" + bytes(size - max(0, at - offset) - 1) if offset <= at else bytes(size)
        )

    pieces = list(rechunk(old, length, [(at, at + 1)], read))
    assert [type(piece.entry) for piece in pieces] == [Hole, Chunk, Hole]
    assert pieces[0].entry.length == at - at % BLOCK_BYTES
    assert sum(piece.entry.length for piece in pieces) == length
    assert sum(end - start for start, end in reader_ranges) < 20 << 20


def test_zeros_at_a_hole_join_it() -> None:
    data = bytearray(noise(12, 1 << 20))
    data[400 * KIB : 500 * KIB] = bytes(100 * KIB)
    pool = Pool()
    old = pool.put(bytes(data))
    for start, end in ((396 * KIB, 400 * KIB), (500 * KIB, 504 * KIB)):
        data[start:end] = bytes(end - start)
    recipe = pool.store(rechunk(old, len(data), [(396 * KIB, 400 * KIB), (500 * KIB, 504 * KIB)], Reader(data)))
    assert holes(recipe) == [(396 * KIB, 504 * KIB)]
    data[420 * KIB : 421 * KIB] = b"x" * KIB  # what is left before it is no hole any more
    recipe = pool.store(rechunk(recipe, len(data), [(420 * KIB, 421 * KIB)], Reader(data)))
    assert holes(recipe) == [(424 * KIB, 504 * KIB)]
    assert recipe == Pool().put(bytes(data))


def test_zeros_behind_a_hole_make_it_longer() -> None:
    data, pool = bytearray(noise(15, 1 << 20)), Pool()
    data[400 * KIB : 500 * KIB] = bytes(100 * KIB)
    old = pool.put(bytes(data))
    data[500 * KIB : 504 * KIB] = bytes(4 * KIB)
    recipe = pool.store(rechunk(old, len(data), [(500 * KIB, 504 * KIB)], Reader(data)))
    assert holes(recipe) == [(400 * KIB, 504 * KIB)]
    assert recipe == Pool().put(bytes(data))


def test_content_that_repeats_itself_comes_back_to_its_old_cuts() -> None:
    """No cut of 0xFF depends on its place: only a forced one leads back to the old ones."""
    data, pool = bytearray(b"\xff" * (7 << 20)), Pool()
    old = pool.put(bytes(data))
    data[1_000_000:1_040_000] = noise(13, 40_000)
    reader = Reader(data)
    assert pool.content(pool.store(rechunk(old, len(data), [(1_000_000, 1_040_000)], reader))) == data
    assert reader.total_bytes < 600_000


def test_a_length_beyond_a_step_is_cut_from_the_beginning() -> None:
    step = SIZES[1].length_max
    data, pool = noise(14, step + 1), Pool()
    old = pool.put(data[:step])
    assert pool.store(rechunk(old, step + 1, [(step, step + 1)], Reader(data))) == Pool().put(data)
