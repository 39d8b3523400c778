"""Bodies of chunks: what is stored is read, and whatever happened to it, no other bytes are."""

import random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.body import (
    BODY_BYTES_MAX,
    DELTA_BYTES_MAX,
    FORMAT,
    HEADER_BYTES,
    MAGIC,
    Base,
    Codec,
    DamagedChunk,
    base_of,
    decode,
    encode,
)
from deltapool.cas.chunk import CHUNK_BYTES_MAX, CHUNK_DIGEST_BYTES, Digest, digest_of

reproducible = settings(derandomize=True, database=None, deadline=None)

TEXT = b"the same line again and again\n" * 40
NOISE = random.Random(1).randbytes(300)
BASE = Base(digest_of(NOISE), NOISE)
DELTA = NOISE[:120] + b"changed" + NOISE[120:]
SAMPLES = [(TEXT, encode(TEXT)), (NOISE, encode(NOISE)), (DELTA, encode(DELTA, base=BASE)), (b"x", encode(b"x"))]


def body(codec: int, length: int, payload: bytes, magic: int = MAGIC, form: int = FORMAT, key: int = 0) -> bytes:
    return bytes((magic, form, codec, key)) + length.to_bytes(4, "big") + payload


def frame(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


def test_the_samples_have_one_codec_each() -> None:
    assert [sample[2] for _, sample in SAMPLES] == [Codec.ZSTD, Codec.RAW, Codec.DELTA, Codec.RAW]
    assert len(SAMPLES[2][1]) < 80
    assert [base_of(sample) for _, sample in SAMPLES] == [None, None, BASE.digest, None]


@settings(reproducible, max_examples=300)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=2000), st.builds(lambda b, n: b * n, st.binary(min_size=1), st.integers(1, 99))
    )
)
def test_what_is_stored_is_read(plain: bytes) -> None:
    stored = encode(plain)
    assert len(stored) <= HEADER_BYTES + len(plain)
    assert decode(stored, digest_of(plain)) == plain


@settings(reproducible, max_examples=300)
@given(st.binary(min_size=1, max_size=2000), st.binary(max_size=2000), st.booleans())
def test_what_is_stored_on_a_base_is_read(plain: bytes, other: bytes, near: bool) -> None:
    base = Base(digest_of(plain[7:] + other), plain[7:] + other) if near else Base(digest_of(other), other)
    stored = encode(plain, base=base)
    assert len(stored) <= len(encode(plain))
    assert base_of(stored) in (None, base.digest)
    assert decode(stored, digest_of(plain), base.plain) == plain


@pytest.mark.parametrize("size", [1, CHUNK_BYTES_MAX])
def test_the_smallest_and_the_largest_chunk(size: int) -> None:
    for plain in (bytes(size), random.Random(2).randbytes(size)):
        stored = encode(plain)
        assert len(stored) <= BODY_BYTES_MAX
        assert decode(stored, digest_of(plain)) == plain


@pytest.mark.parametrize("plain", [b"", bytes(CHUNK_BYTES_MAX + 1)])
def test_what_is_no_chunk_is_not_stored(plain: bytes) -> None:
    with pytest.raises(ValueError, match="a chunk has 1 to 4194304 bytes"):
        encode(plain)


def test_large_chunks_are_no_deltas_and_no_bases() -> None:
    large = random.Random(3).randbytes(DELTA_BYTES_MAX + 1)
    assert base_of(encode(large, base=Base(digest_of(large[:-1]), large[:-1]))) is None
    assert base_of(encode(large[:-1], base=Base(digest_of(large), large))) is None
    assert base_of(encode(large[:-1], base=Base(digest_of(large[2:]), large[2:]))) == digest_of(large[2:])


def test_the_bytes_of_a_body_can_be_read_for_ever() -> None:
    """Written down once, by the first release. What another release of zstd writes may differ."""
    compressed = (
        "db010100000004b028b52ffd60b003150100c07468652073616d65206c696e6520616761696e20616e640a02008f04f5c562a509"
    )
    assert decode(bytes.fromhex(compressed), digest_of(TEXT)) == TEXT
    assert decode(bytes.fromhex("db01000000000003616263"), digest_of(b"abc")) == b"abc"
    base = bytes(range(256))
    delta = (
        "db0102000000010740aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880"
        "28b52ffd600700950000386368616e67656402001985a52c0ca40b08"
    )
    plain = base[:100] + b"changed" + base[100:]
    assert base_of(bytes.fromhex(delta)) == digest_of(base)
    assert decode(bytes.fromhex(delta), digest_of(plain), base) == plain


@pytest.mark.parametrize(("plain", "stored"), SAMPLES)
def test_a_body_cut_anywhere_is_damaged(plain: bytes, stored: bytes) -> None:
    for cut in range(len(stored)):
        with pytest.raises(DamagedChunk):
            decode(stored[:cut], digest_of(plain), BASE.plain)
    with pytest.raises(DamagedChunk):
        decode(stored + b"\0", digest_of(plain), BASE.plain)


@pytest.mark.parametrize(("plain", "stored"), SAMPLES)
def test_a_flipped_bit_never_gives_other_bytes(plain: bytes, stored: bytes) -> None:
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert decode(bytes(damaged), digest_of(plain), BASE.plain) == plain
        except DamagedChunk:
            continue


@settings(reproducible, max_examples=500)
@given(st.binary(max_size=200), st.sampled_from(Codec), st.integers(0, 300))
def test_noise_is_never_a_chunk(noise: bytes, codec: Codec, length: int) -> None:
    for stored in (noise, body(codec, length, noise), body(codec, length, frame(noise))):
        with pytest.raises(DamagedChunk):
            decode(stored, digest_of(b"something else"), NOISE)


HUGE = frame(bytes(CHUNK_BYTES_MAX + 1))
UNTOLD = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
ON_OTHER = zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(NOISE, 1)).compress(DELTA)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"", "0 bytes are no header"),
        (b"\xdb\x01\x00\x00\x00\x00\x00", "7 bytes are no header"),
        (body(0, 1, b"x", magic=0xDE), "begins with 0xde, not 0xdb"),
        (body(0, 1, b"x", form=2), "of format 2, and this reader knows 1"),
        (body(3, 1, b"x"), "unknown codec 3"),
        (body(0, 1, b"x", key=7), "needs key 7"),
        (body(0, 0, b""), "promises 0 bytes"),
        (body(0, CHUNK_BYTES_MAX + 1, bytes(CHUNK_BYTES_MAX + 1)), "promises 4194305 bytes"),
        (body(1, 1 << 31, HUGE), "promises 2147483648 bytes"),
        (body(0, 2, b"x"), "promises 2 bytes, and 1 follow"),
        (body(0, 1, b"xy"), "promises 1 bytes, and 2 follow"),
        (body(1, 100, HUGE[:99]), "promises 100 bytes, its zstd frame 4194305"),
        (body(1, 1000, HUGE), "promises 1000 bytes, its zstd frame 4194305"),
        (body(1, 1000, UNTOLD), "promises 1000 bytes, its zstd frame -1"),
        (body(1, 10, frame(TEXT)), "it would have been stored raw"),
        (body(1, len(TEXT), frame(TEXT)[:-1]), "zstd: "),
        (body(1, len(TEXT), frame(TEXT) + b"x"), "zstd: .*unused"),
        (body(1, len(TEXT), frame(TEXT) * 2), "zstd: .*unused"),
        (body(1, len(TEXT), b""), "zstd: "),
        (body(1, len(TEXT), b"\x50\x2a\x4d\x18\x01\0\0\0x"), "its zstd frame 0"),
        (body(1, len(TEXT), frame(TEXT[::-1])), "SHA-256 of its plaintext is"),
        (body(1, len(DELTA), ON_OTHER), "zstd: |SHA-256"),
        (body(2, len(TEXT), bytes(31)), "no delta: 31 bytes"),
        (body(2, DELTA_BYTES_MAX + 1, bytes(40)), "no delta"),
        (body(2, len(TEXT), bytes(32) + frame(TEXT)[:-1]), "zstd: "),
    ],
)
def test_damage_has_a_reason(stored: bytes, reason: str) -> None:
    digest = digest_of(b"".join((TEXT, TEXT)))
    with pytest.raises(DamagedChunk, match=reason) as caught:
        decode(stored, digest, NOISE)
    assert caught.value.digest == digest
    assert str(caught.value).startswith(f"chunk {digest.hex()} is damaged: ")


@pytest.mark.parametrize("base", [None, b"", b"short", bytes(DELTA_BYTES_MAX + 1)])
def test_a_delta_without_its_base_says_which(base: bytes | None) -> None:
    with pytest.raises(DamagedChunk, match=f"its base {BASE.digest.hex()} is missing"):
        decode(SAMPLES[2][1], digest_of(DELTA), base)


def test_a_delta_on_another_base_is_no_other_chunk() -> None:
    with pytest.raises(DamagedChunk):
        decode(SAMPLES[2][1], digest_of(DELTA), NOISE[::-1])


def test_digests_are_sha_256() -> None:
    assert digest_of(b"").hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert len(digest_of(memoryview(b"abc"))) == CHUNK_DIGEST_BYTES == len(Digest(bytes(32)))
