"""The pool, recipes, sealing and sweeping: what is stored is given back, once, and what nobody names goes."""

import pathlib
import random

import apsw
import pytest

from deltapool.cas.body import DamagedChunk
from deltapool.cas.chunk import Digest, digest_of
from deltapool.cas.index import PoolError
from deltapool.cas.pool import CHUNKS, NEW, MissingChunk, Pool, PoolReader, file_of
from deltapool.cas.recipe import Chunk, DamagedRecipe, Recipe
from deltapool.cas.recipes import Recipes
from deltapool.cas.sealing import HEAD_BYTES, SEGMENT_BYTES, sealed, sealed_length
from deltapool.cas.sweep import sweep
from deltapool.cas.undo import HEADER_BYTES, UndoIndex, encode

LARGE = 300 << 10


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "pool"


def stored(pool: Pool, *contents: bytes) -> list[Digest]:
    for content in contents:
        pool.add(digest_of(content), content)
    pool.flush()
    return [digest_of(content) for content in contents]


def test_what_was_flushed_is_there_for_everybody(folder: pathlib.Path) -> None:
    contents = [b"a" * 100, random.Random(1).randbytes(1000), random.Random(2).randbytes(LARGE)]
    pool = Pool(folder)
    digests = stored(pool, *contents)
    reader = PoolReader(folder)
    assert [reader.read(digest) for digest in digests] == contents
    assert pool.add(digests[0], contents[0]) == 0  # stored once
    reader.close()
    pool.close()


def test_a_chunk_like_another_is_stored_as_its_delta(folder: pathlib.Path) -> None:
    pool, old = Pool(folder), random.Random(1).randbytes(50_000)
    new = old[:1000] + b"x" + old[1001:]
    (near,) = stored(pool, old)
    assert pool.add(digest_of(new), new, near) < 500
    pool.flush()
    assert pool.read(digest_of(new)) == new
    pool.close()


def test_a_pool_belongs_to_one_process(folder: pathlib.Path) -> None:
    pool = Pool(folder)
    with pytest.raises(PoolError, match="in use"):
        Pool(folder)
    pool.close()


def test_leftovers_are_removed_and_nothing_else(folder: pathlib.Path) -> None:
    pool = Pool(folder)
    (large,) = stored(pool, random.Random(3).randbytes(LARGE))
    pool.close()
    (folder / NEW / "7").write_bytes(b"half")
    stray = folder / file_of(CHUNKS, digest_of(b"stray"))
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"stray")
    pool = Pool(folder)
    assert not list((folder / NEW).iterdir())
    assert not stray.exists()
    assert len(pool.read(large)) == LARGE
    pool.close()


def test_a_damaged_and_a_missing_chunk_are_named(folder: pathlib.Path) -> None:
    pool = Pool(folder)
    (large,) = stored(pool, random.Random(3).randbytes(LARGE))
    path = folder / file_of(CHUNKS, large)
    body = bytearray(path.read_bytes())
    body[1000] ^= 1
    path.write_bytes(body)
    with pytest.raises(DamagedChunk, match=large.hex()):
        pool.read(large)
    with pytest.raises(MissingChunk, match=digest_of(b"never").hex()):
        pool.read(digest_of(b"never"))
    pool.close()


def test_a_sweep_keeps_what_recipes_name_and_measures_the_past(folder: pathlib.Path) -> None:
    source, pool = random.Random(4), Pool(folder)
    contents = [source.randbytes(40_000) for _ in range(6)]
    digests = stored(pool, *contents)
    recipes = [Recipe((Chunk(digest, 40_000),)) for digest in digests]
    swept = sweep(pool, recipes[:1], recipes[1:2])
    assert 40_000 <= swept.history_bytes < 40_100
    assert swept.bytes_freed > 150_000
    assert [pool.read(digest) for digest in digests[:2]] == contents[:2]
    for digest in digests[2:]:
        with pytest.raises(MissingChunk):
            pool.read(digest)
    pool.close()


def test_a_sweep_keeps_the_base_of_a_living_delta(folder: pathlib.Path) -> None:
    pool, old = Pool(folder), random.Random(1).randbytes(50_000)
    new = old[:1000] + b"x" + old[1001:]
    (near,) = stored(pool, old)
    pool.add(digest_of(new), new, near)
    pool.flush()
    sweep(pool, [Recipe((Chunk(digest_of(new), len(new)),))], [])
    assert pool.read(digest_of(new)) == new
    pool.close()


def test_recipes_are_made_on_the_one_before_and_go_with_their_last_use() -> None:
    connection = apsw.Connection(":memory:")
    connection.execute(
        "CREATE TABLE recipe(id INTEGER PRIMARY KEY, record BLOB NOT NULL, base INTEGER, uses INTEGER NOT NULL)"
    )
    recipes = Recipes(connection)
    chunks = [Chunk(digest_of(bytes([number])), 1000) for number in range(100)]
    first, second = Recipe(tuple(chunks)), Recipe((*chunks[:50], Chunk(digest_of(b"new"), 5), *chunks[51:]))
    one = recipes.add(first, None)
    recipes.use(one)
    two = recipes.add(second, one)
    recipes.use(two)
    assert (recipes.load(one), recipes.load(two)) == (first, second)
    recipes.drop(one)  # still the base of the other
    assert recipes.load(two) == second
    recipes.drop(two)
    assert list(recipes.all()) == []
    with pytest.raises(DamagedRecipe, match="missing"):
        recipes.load(two)


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, SEGMENT_BYTES, SEGMENT_BYTES + 300_000])
def test_a_journal_is_sealed_at_fixed_offsets(length: int) -> None:
    content = random.Random(5).randbytes(length)
    pieces = list(sealed(None, length, 0, lambda offset, size: content[offset : offset + size]))
    assert b"".join(piece.data or b"" for piece in pieces) == content
    recipe = Recipe(tuple(piece.entry for piece in pieces))
    if length >= HEAD_BYTES:
        assert recipe.entries[0].length == HEAD_BYTES
        assert sealed_length(length) == length or sealed_length(length) in recipe.starts
    more = content + b"more\n"
    reads: list[int] = []

    def read(offset: int, size: int) -> bytes:
        reads.append(offset)
        return more[offset : offset + size]

    grown = list(sealed(recipe, len(more), length, read))
    assert sum(piece.entry.length for piece in grown) == len(more)
    assert all(offset >= sealed_length(length) for offset in reads)


def test_the_first_record_after_a_position_is_what_was_pinned() -> None:
    index = UndoIndex()
    data = encode(7, 10, b"first") + encode(7, 12, b"later") + encode(8, 10, b"other")
    torn = encode(7, 0, b"torn")[:-1]
    assert index.feed(1, 0, data + torn) == len(data)

    def seen(position: tuple[int, int]) -> bytes:
        content = bytearray(b"." * 20)
        for saved in index.overlay(7, position, 0, 20):
            content[saved.start : saved.end] = data[saved.at : saved.at + saved.end - saved.start]
        return bytes(content)

    assert seen((1, 0)) == b"..........firster..."
    assert seen((1, HEADER_BYTES + 5)) == b"............later..."
    assert seen((2, 0)) == b"." * 20
