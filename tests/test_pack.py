"""Packs: the last bytes of one say where everything is, and damage there is never an index."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas import pack as module
from deltapool.cas.body import BODY_BYTES_MAX, encode
from deltapool.cas.chunk import Digest, digest_of
from deltapool.cas.pack import (
    ENTRY_BYTES,
    PACK_BYTES_MAX,
    PACK_BYTES_TARGET,
    TAIL_BYTES,
    TRAILER_BYTES,
    DamagedPack,
    NeedTail,
    Pack,
    PackBuilder,
    PackEntry,
    read_index,
)

reproducible = settings(derandomize=True, database=None, deadline=None)


def packed(*plains: bytes) -> Pack:
    builder = PackBuilder()
    for plain in plains:
        builder.add(digest_of(plain), encode(plain))
    return builder.finish()


SAMPLE = packed(b"first", b"second" * 20, b"third")


def with_entries(*entries: PackEntry, bodies: int, count: int | None = None) -> bytes:
    """The end of a pack with an index of our own, sound but for what is in it."""
    footer = b"".join(each.digest + each.offset.to_bytes(4, "big") + each.length.to_bytes(4, "big") for each in entries)
    trailer = module._trailer(footer)
    if count is not None:
        trailer = count.to_bytes(4, "big") + trailer[4:]
    return bytes(bodies) + footer + trailer


@settings(reproducible, max_examples=200)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20, unique=True), st.data())
def test_what_is_packed_is_found(plains: list[bytes], data: st.DataObject) -> None:
    builder, offsets = PackBuilder(), []
    for plain in plains:
        assert digest_of(plain) not in builder
        offsets.append(builder.add(digest_of(plain), encode(plain)))
        assert digest_of(plain) in builder
    pack = builder.finish()
    assert pack.name == digest_of(pack.data)
    assert len(pack.data) == builder.size
    size = len(pack.data)
    tail = data.draw(st.integers(0, size))
    index = read_index(pack.data[size - tail :], size)
    if isinstance(index, NeedTail):
        assert tail < index.tail_bytes <= len(plains) * ENTRY_BYTES + TRAILER_BYTES
        index = read_index(pack.data[-index.tail_bytes :], size)
        if isinstance(index, NeedTail):
            index = read_index(pack.data[-index.tail_bytes :], size)
    assert index == pack.entries
    assert [entry.offset for entry in pack.entries] == offsets
    for entry, plain in zip(pack.entries, plains, strict=True):
        assert pack.data[entry.offset : entry.offset + entry.length] == encode(plain)


def test_the_bytes_of_a_pack_stay_the_same() -> None:
    """Written down once: a change of the format is a new version."""
    pack = packed(b"a", b"bc")
    digests = [digest_of(b"a").hex(), digest_of(b"bc").hex()]
    assert pack.data.hex() == (
        f"db0100000000000161db010000000000026263{digests[0]}0000000000000009{digests[1]}000000090000000a"
        "0000000200000050" + pack.data[-16:-8].hex() + "64705041434b0001"
    )
    assert pack.name.hex() == "ed1bea7c8e3f615d42c3ddc0963b9aff8f8c955540736aa28287df5d861779e0"


def test_a_pack_cut_anywhere_is_damaged() -> None:
    for cut in range(len(SAMPLE.data)):
        with pytest.raises(DamagedPack):
            read_index(SAMPLE.data[:cut], cut)


def test_every_flipped_bit_of_an_index_is_found() -> None:
    index_bytes = len(SAMPLE.entries) * ENTRY_BYTES + TRAILER_BYTES
    for bit in range(8 * index_bytes):
        damaged = bytearray(SAMPLE.data)
        damaged[len(damaged) - index_bytes + bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedPack):
            read_index(bytes(damaged), len(damaged))


@settings(reproducible, max_examples=300)
@given(st.binary(max_size=200))
def test_noise_is_never_an_index(noise: bytes) -> None:
    with pytest.raises(DamagedPack):
        read_index(noise, len(noise) if len(noise) >= TRAILER_BYTES else TRAILER_BYTES - 1)


D = [Digest(bytes((n,)) * 32) for n in range(3)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_entries(bodies=50), "0 bodies"),
        (with_entries(PackEntry(D[0], 0, 20), bodies=20, count=2), "40 bytes for 2 bodies"),
        (with_entries(PackEntry(D[0], 1, 20), bodies=21), "a body of 20 bytes at 1, where the one before ends at 0"),
        (with_entries(PackEntry(D[0], 0, 20), PackEntry(D[1], 19, 20), bodies=39), "at 19, .* ends at 20"),
        (with_entries(PackEntry(D[0], 0, 8), bodies=8), "a body of 8 bytes"),
        (with_entries(PackEntry(D[0], 0, BODY_BYTES_MAX + 1), bodies=BODY_BYTES_MAX + 1), "a body of 4194313 bytes"),
        (with_entries(PackEntry(D[0], 0, 20), bodies=21), "bodies end at 20, its footer begins at 21"),
        (with_entries(PackEntry(D[0], 0, 20), bodies=19), "bodies end at 20, its footer begins at 19"),
        (with_entries(PackEntry(D[0], 0, 20), PackEntry(D[0], 20, 20), bodies=40), "names a chunk twice"),
        (SAMPLE.data[:-1] + b"\x02", "version 2, and this reader knows 1"),
        (SAMPLE.data[:-2] + b"..", "version"),
        (SAMPLE.data[:-5] + b".", "does not end as one"),
    ],
)
def test_an_index_that_is_none_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedPack, match=reason):
        read_index(data, len(data))


def test_no_pack_is_larger_than_the_limit() -> None:
    for size in (0, TRAILER_BYTES - 1, PACK_BYTES_MAX + 1):
        with pytest.raises(DamagedPack, match=f"no pack has {size} bytes"):
            read_index(b"", size)
    with pytest.raises(ValueError, match="last bytes of"):
        read_index(SAMPLE.data, len(SAMPLE.data) - 1)


def test_what_does_not_fit_is_refused() -> None:
    builder = PackBuilder()
    with pytest.raises(ValueError, match="at least one body"):
        builder.finish()
    builder.add(D[0], bytes(20))
    for digest, body, reason in (
        (D[0], bytes(20), "in this pack already"),
        (D[1][1:], bytes(20), "digest of 31"),
        (D[1], bytes(8), "8 bytes"),
        (D[1], bytes(BODY_BYTES_MAX + 1), "4194313 bytes"),
    ):
        with pytest.raises(ValueError, match=reason):
            builder.add(Digest(digest), body)
    assert len(builder) == 1


def test_a_pack_is_full_at_its_target_and_ends_at_its_limit() -> None:
    builder, rng, body = PackBuilder(), random.Random(1), bytes(1 << 20)
    while builder.has_room(len(body)):
        assert builder.full == (builder.size >= PACK_BYTES_TARGET)
        builder.add(Digest(rng.randbytes(32)), body)
    with pytest.raises(ValueError, match="no room for 1048576 more"):
        builder.add(D[0], body)
    pack = builder.finish()
    assert PACK_BYTES_MAX - len(body) < len(pack.data) <= PACK_BYTES_MAX
    assert read_index(pack.data[-TAIL_BYTES:], len(pack.data)) == pack.entries
