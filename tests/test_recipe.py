"""Recipes: what a range is made of, and records that prove themselves."""

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas import recipe as module
from deltapool.cas.chunk import CHUNK_BYTES_MAX, Digest
from deltapool.cas.recipe import (
    CHECKSUM_BYTES,
    LENGTH_MAX,
    MAGIC,
    VERSION,
    Chunk,
    DamagedRecipe,
    Entry,
    Hole,
    Part,
    Recipe,
    decode,
    encode,
    needs_base,
    recipe_of,
    replaced,
)
from deltapool.cas.wire import varint

reproducible = settings(derandomize=True, database=None, deadline=None)


def chunk(name: int, length: int = 100) -> Chunk:
    return Chunk(Digest(bytes((name,)) * 32), length)


PLAIN = Recipe((chunk(1, 70_000), Hole(1 << 40), chunk(2, 5), chunk(1, 70_000)))
CHANGED = Recipe((chunk(1, 70_000), Hole(1 << 40), chunk(3, 6), chunk(1, 70_000), chunk(4, 1)))

chunks = st.builds(chunk, st.integers(0, 9), st.integers(1, 300))
entries = st.lists(st.one_of(chunks, chunks, st.builds(Hole, st.integers(1, 300))), max_size=30)
recipes = entries.map(recipe_of)
bases = st.one_of(st.none(), recipes)


def seal(body: bytes, flags: int = 0, magic: int = MAGIC, version: int = VERSION) -> bytes:
    """A record with a body of our own, sound but for what is in it."""
    record = bytes((magic, version, flags)) + body
    return record + xxhash.xxh3_64_digest(record)


# Values


@settings(reproducible, max_examples=200)
@given(recipes, st.integers(0, 4000), st.integers(0, 4000))
def test_the_parts_of_a_range_are_its_bytes(recipe: Recipe, start: int, end: int) -> None:
    content = [(number, at) for number, entry in enumerate(recipe.entries) for at in range(entry.length)]
    assert recipe.length == len(content)
    found: list[tuple[int, int]] = []
    offset = start
    for part in recipe.parts(start, end):
        number = recipe.index(part.offset)
        assert (part.offset, part.entry) == (offset, recipe.entries[number])
        assert part.length > 0
        found += ((number, at) for at in range(part.start, part.start + part.length))
        offset += part.length
    assert found == content[start:end]


def test_a_range_and_its_parts() -> None:
    recipe = Recipe((chunk(1), Hole(50), chunk(2)))
    assert recipe.starts == (0, 100, 150)
    assert list(recipe.chunks()) == [chunk(1), chunk(2)]
    assert list(recipe.parts(90, 151)) == [
        Part(90, chunk(1), 90, 10),
        Part(100, Hole(50), 0, 50),
        Part(150, chunk(2), 0, 1),
    ]
    assert list(recipe.parts(250, 300)) == list(Recipe().parts(0, 10)) == []
    for offset in (-1, 250):
        with pytest.raises(IndexError, match="no byte at"):
            recipe.index(offset)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([chunk(1, 0)], "has 0 bytes"),
        ([Hole(0)], "has 0 bytes"),
        ([Hole(-1)], "has -1 bytes"),
        ([chunk(1, CHUNK_BYTES_MAX + 1)], "has 4194305 bytes"),
        ([Chunk(Digest(b"short"), 1)], "a digest has 32 bytes, not 5"),
        ([Hole(1), Hole(1)], "two holes in a row"),
        ([Hole(LENGTH_MAX), chunk(1)], "exceed the limits"),
    ],
)
def test_what_is_no_recipe_is_refused(pieces: list[Entry], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Recipe(tuple(pieces))


def test_holes_in_a_row_become_one() -> None:
    assert recipe_of([Hole(1), Hole(2), chunk(1), Hole(3), Hole(4)]).entries == (Hole(3), chunk(1), Hole(7))


# Records


@settings(reproducible, max_examples=500)
@given(recipes, bases)
def test_what_is_written_is_read(recipe: Recipe, base: Recipe | None) -> None:
    record = encode(recipe, base)
    assert needs_base(record) == (base is not None)
    assert decode(record, base) == recipe


@settings(reproducible, max_examples=200)
@given(recipes, recipes)
def test_a_record_without_a_base_asks_for_none(recipe: Recipe, base: Recipe) -> None:
    assert decode(encode(recipe), base) == recipe


@settings(reproducible, max_examples=200)
@given(recipes, recipes, bases)
def test_a_record_on_a_base_is_read_on_no_other(recipe: Recipe, base: Recipe, other: Recipe | None) -> None:
    if base != other:
        with pytest.raises(DamagedRecipe, match="another base"):
            decode(encode(recipe, base), other)


def test_a_record_on_a_base_is_short() -> None:
    old = Recipe(tuple(Chunk(Digest(n.to_bytes(32, "big")), 9000) for n in range(1000)))
    new = Recipe((*old.entries[:500], chunk(77), *old.entries[501:900], *old.entries[901:]))
    assert len(encode(old)) > 34 * 1000
    assert len(encode(new, old)) < 80
    assert decode(encode(new, old), old) == new


def test_the_bytes_of_a_record_stay_the_same() -> None:
    """Written down once: a change of the format is a new version."""
    one, two, three, four = (f"{n:02x}" * 32 for n in (1, 2, 3, 4))
    assert encode(PLAIN).hex() == (f"dc0100e5c58880802004c08b11{one}8180808080800114{two}c08b11{one}896faa0ae02e461c")
    assert encode(CHANGED, PLAIN).hex() == (
        f"dc0101e7c588808020896faa0ae02e461c050a0018{three}060304{four}3152197b1b66deca"
    )


@pytest.mark.parametrize(("record", "base"), [(encode(PLAIN), None), (encode(CHANGED, PLAIN), PLAIN)])
def test_damage_is_never_a_recipe(record: bytes, base: Recipe | None) -> None:
    for cut in range(len(record)):
        with pytest.raises(DamagedRecipe):
            decode(record[:cut], base)
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecipe):
            decode(bytes(damaged), base)


@settings(reproducible, max_examples=500)
@given(st.binary(max_size=150), st.sampled_from([0, 1]), bases)
def test_noise_is_never_a_recipe(noise: bytes, flags: int, base: Recipe | None) -> None:
    for record in (noise, seal(noise, flags)):
        try:
            found = decode(record, base)
        except DamagedRecipe:
            continue
        assert decode(encode(found)) == found


HUGE = varint((1 << 64) - 1)
ON_PLAIN = module._checksum(PLAIN)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "does not begin as one"),
        (seal(b"\0\0", magic=0xDE), "does not begin as one"),
        (seal(b"\0\0", version=2), "version 2, and this reader knows 1"),
        (seal(b"\0\0", flags=2), "unknown flags 0x02"),
        (encode(PLAIN)[:-1] + b"x", "checksum"),
        (seal(b""), "ends within a value"),
        (seal(b"\0\0\0"), "1 bytes follow"),
        (seal(b"\1\0"), "have 0 bytes, not 1"),
        (seal(b"\0" + HUGE), "pieces exceed the limit"),
        (seal(b"\5\1" + varint(5 << 2)), "ends within a value"),
        (seal(b"\5\1" + varint(5 << 2 | 3)), "unknown kind of piece 3"),
        (seal(b"\0\1" + varint(1)), "has 0 bytes"),
        (seal(b"\5\2" + varint(2 << 2 | 1) + varint(3 << 2 | 1)), "two holes in a row"),
        (seal(b"\0\1" + varint(CHUNK_BYTES_MAX + 1 << 2) + bytes(32)), "has 4194305 bytes"),
        (seal(HUGE + b"\1" + HUGE), "unknown kind"),
        (seal(b"\5\1" + varint(1 << 2 | 2) + b"\0"), "copies 1 pieces from number 0 on"),
        (seal(b"\5\1", flags=1), "ends within a value"),
        (seal(b"\5\1" + bytes(8), flags=1), "another base"),
        (seal(b"\5" + ON_PLAIN + b"\1" + varint(2) + b"\0", flags=1), "copies 0 pieces"),
        (seal(b"\5" + ON_PLAIN + b"\1" + varint(2 << 2 | 2) + b"\0", flags=1), "copies 2 pieces"),
        (seal(b"\5" + ON_PLAIN + b"\2" + varint(2 << 2 | 2) + b"\3", flags=1), "from number 3 on"),
    ],
)
def test_a_record_that_is_none_is_refused(record: bytes, reason: str) -> None:
    """Also what says that it is huge: nothing is allocated for a number before the bytes are there."""
    with pytest.raises(DamagedRecipe, match=reason):
        decode(record, PLAIN)


def test_checksums_have_eight_bytes() -> None:
    assert len(ON_PLAIN) == CHECKSUM_BYTES


# What stands for what


def test_a_new_chunk_stands_for_the_one_that_was_there() -> None:
    a, b, c, d = (chunk(n) for n in range(4))
    new, more = chunk(10, 90), chunk(11, 120)
    assert list(replaced(Recipe((a, b, c)), Recipe((a, new, c)))) == [(1, b)]
    assert list(replaced(Recipe((a, b, c)), Recipe((new, b, more)))) == [(0, a), (2, c)]
    assert list(replaced(Recipe((a, b, c, d)), Recipe((a, new, more, d)))) == [(1, b), (2, c)]
    assert list(replaced(Recipe((a, b, c)), Recipe((a, new, more, c)))) == [(1, b), (2, b)]
    assert list(replaced(Recipe((a,)), Recipe((new,)))) == [(0, a)]
    assert list(replaced(Recipe((a, b)), Recipe((a, new, b)))) == []
    assert list(replaced(Recipe((a, Hole(9), b)), Recipe((a, new, b)))) == []
    assert list(replaced(Recipe(), Recipe((new,)))) == list(replaced(Recipe((a,)), Recipe())) == []


@settings(reproducible, max_examples=300)
@given(recipes, recipes)
def test_what_stands_for_a_new_chunk_is_an_old_one(old: Recipe, new: Recipe) -> None:
    pairs = list(replaced(old, new))
    assert [number for number, _ in pairs] == sorted({number for number, _ in pairs})
    for number, there in pairs:
        assert isinstance(new.entries[number], Chunk)
        assert new.entries[number] not in old.entries
        assert there in old.entries
