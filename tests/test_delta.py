"""The records of deltas: what is written is read, what is damaged is found, and the document says how."""

import random
import re
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.digest import digest_bytes
from deltapool.fs import delta as module
from deltapool.fs.delta import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    NEED_MORE,
    RECORD_BYTES_MAX,
    STEPS_MAX,
    Append,
    Born,
    DamagedRecord,
    Decoder,
    Delta,
    Keep,
    Patch,
    Step,
    StepKind,
    Truncate,
    encode,
    steps_of,
    steps_of_replacement,
)
from deltapool.fs.extents import AppendRange, PatchRange, TruncateTo
from deltapool.fs.fold import Replacement
from deltapool.fs.replay import LENGTH_MAX

reproducible = settings(derandomize=True, database=None, deadline=None)
DIGEST = bytes(range(16))
PLAIN = Delta(7, 1_700_000_000_000_000_000, None, (Append(b"line\n"),), 5, DIGEST)
RICH = Delta(
    1 << 40 | 3,
    -1,
    Born(b"a/b.jsonl", 0o100644, (1 << 64) - 1, 1 << 39),
    (Keep(3, 200, 300), Patch(17, b"patched"), Truncate(1 << 20), Append(b"tail")),
    (1 << 20) + 4,
    DIGEST,
)
FRESH = Delta(9, 0, Born(b"\xff not utf-8", 0o100600), (), 0, digest_bytes(b""))

numbers = st.one_of(st.integers(0, 200), st.integers(0, (1 << 64) - 1))
steps = st.one_of(
    st.builds(Append, st.binary(max_size=200)),
    st.builds(Patch, numbers, st.binary(max_size=200)),
    st.builds(Truncate, numbers),
    st.builds(Keep, numbers, numbers, numbers),
)
births = st.one_of(
    st.none(), st.builds(Born, st.binary(max_size=50), numbers), st.builds(Born, st.binary(), numbers, numbers, numbers)
)
deltas = st.builds(
    Delta,
    numbers,
    st.integers(-(1 << 63), (1 << 63) - 1),
    births,
    st.lists(steps, max_size=5).map(tuple),
    numbers,
    st.binary(min_size=16, max_size=16),
)


def decode(data: bytes) -> Delta:
    decoder = Decoder()
    decoder.feed(data)
    found = decoder.next()
    assert found is not NEED_MORE
    assert decoder.next() is NEED_MORE
    assert decoder.buffered_bytes == 0
    return found


def seal(body: bytes, version: int = module.VERSION) -> bytes:
    """A record with a body of our own, sound but for what is in it."""
    fields = bytes((module.MAGIC, version)) + len(body).to_bytes(4, "big")
    record = fields + xxhash.xxh3_64_digest(fields)[:4] + body
    return record + xxhash.xxh3_64_digest(record)


# What is written is read


@settings(reproducible, max_examples=500)
@given(deltas)
def test_what_is_written_is_read(delta: Delta) -> None:
    assert decode(encode(delta)) == delta


@settings(reproducible, max_examples=100)
@given(st.lists(deltas, max_size=4), st.randoms(use_true_random=False))
def test_a_stream_is_read_whatever_its_pieces(stream: list[Delta], rng: random.Random) -> None:
    data, decoder, found = b"".join(map(encode, stream)), Decoder(position=1000), []
    at = 0
    while at < len(data):
        size = rng.randrange(1, 100)
        decoder.feed(data[at : at + size])
        at += size
        while (delta := decoder.next()) is not NEED_MORE:
            found.append(delta)
    assert found == stream
    assert decoder.position == 1000 + len(data)
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize("delta", [PLAIN, RICH, FRESH])
def test_a_record_cut_anywhere_needs_more(delta: Delta) -> None:
    record = encode(delta)
    for cut in range(len(record)):
        decoder = Decoder()
        decoder.feed(record[:cut])
        assert decoder.next() is NEED_MORE
        assert decoder.buffered_bytes == cut
        decoder.feed(record[cut:])
        assert decoder.next() == delta


def test_the_bytes_of_a_record_stay_the_same() -> None:
    """Written down once: a change of the format is a new version."""
    assert encode(PLAIN).hex() == (
        "de0100000024fecf32fe00078080d0e2c6bfce972f0101056c696e650a05000102030405060708090a0b0c0d0e0f8c185399cb467d8b"
    )
    assert encode(RICH).hex() == (
        "de0100000053f57ee987038380808080200109612f622e6a736f6e6ca48302ffffffffffffffffff01808080808010040403c801ac02"
        "021107706174636865640380804001047461696c848040000102030405060708090a0b0c0d0e0fc278660959d6b211"
    )


@pytest.mark.parametrize(
    "delta",
    [
        Delta(-1, 0, None, (), 0, DIGEST),
        Delta(1 << 64, 0, None, (), 0, DIGEST),
        Delta(1, 1 << 63, None, (), 0, DIGEST),
        Delta(1, 0, None, (), 0, DIGEST[1:]),
        Delta(1, 0, None, (Truncate(0),) * (STEPS_MAX + 1), 0, DIGEST),
        Delta(1, 0, Born(b"path", 0o644, None, 5), (), 5, DIGEST),
        Delta(1, 0, None, (Append(bytes(RECORD_BYTES_MAX)),), RECORD_BYTES_MAX, DIGEST),
    ],
)
def test_what_would_not_be_read_is_not_written(delta: Delta) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        encode(delta)


# What is damaged is found


@pytest.mark.parametrize("delta", [PLAIN, RICH, FRESH])
def test_every_flipped_bit_is_found(delta: Delta) -> None:
    """At once, too: a damaged length is not taken for a record that goes on."""
    record = encode(delta)
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.feed(damaged)
        with pytest.raises(DamagedRecord) as caught:
            decoder.next()
        assert caught.value.position == 0
        assert caught.value.next_position == (None if bit < 8 * HEADER_BYTES else len(record))


@pytest.mark.parametrize("body_bytes", [0, 1, 255, 256, 65_535, 1 << 20, RECORD_BYTES_MAX - HEADER_BYTES - 8])
def test_every_flipped_bit_of_a_header_is_found(body_bytes: int) -> None:
    header = seal(bytes(body_bytes))[:HEADER_BYTES]
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.feed(damaged)
        with pytest.raises(DamagedRecord, match="header is not sound"):
            decoder.next()


@settings(reproducible, max_examples=300)
@given(deltas, st.data())
def test_damage_of_any_kind_is_never_a_value(delta: Delta, data: st.DataObject) -> None:
    record = bytearray(encode(delta))
    start = data.draw(st.integers(0, len(record) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=len(record) - start))
    if record[start : start + len(noise)] == noise:
        return
    record[start : start + len(noise)] = noise
    decoder = Decoder()
    decoder.feed(record)
    with pytest.raises(DamagedRecord):
        decoder.next()


@settings(reproducible, max_examples=300)
@given(st.binary(max_size=300))
def test_noise_is_never_a_value(noise: bytes) -> None:
    for data in (noise, seal(noise)):
        decoder = Decoder()
        decoder.feed(data)
        try:
            found = decoder.next()
        except DamagedRecord:
            continue
        assert found is NEED_MORE or encode(found) == data


def test_the_records_around_a_damaged_one_are_read() -> None:
    first, second, third = encode(PLAIN), bytearray(encode(RICH)), encode(FRESH)
    second[HEADER_BYTES] ^= 1
    decoder = Decoder()
    decoder.feed(first + second + third)
    assert decoder.next() == PLAIN
    with pytest.raises(DamagedRecord, match="checksum") as caught:
        decoder.next()
    assert (caught.value.position, caught.value.next_position) == (len(first), len(first) + len(second))
    assert decoder.next() == FRESH


def test_after_a_damaged_header_nothing_is_read() -> None:
    record = bytearray(encode(PLAIN))
    record[3] ^= 1
    decoder = Decoder()
    decoder.feed(record + encode(RICH))
    for _ in range(2):
        with pytest.raises(DamagedRecord, match="header"):
            decoder.next()
    assert decoder.position == 0


def test_a_length_above_the_limit_is_not_waited_for() -> None:
    decoder = Decoder(record_bytes_max=100)
    decoder.feed(seal(bytes(83))[:HEADER_BYTES])
    with pytest.raises(DamagedRecord, match="101 bytes exceed the limit of 100"):
        decoder.next()
    fields = bytes((module.MAGIC, 1)) + b"\xff" * 4
    decoder = Decoder()
    decoder.feed(fields + xxhash.xxh3_64_digest(fields)[:4])
    with pytest.raises(DamagedRecord, match="exceed the limit"):
        decoder.next()


HUGE = b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ends within a value"),
        (b"\x04\x01\x00\x00\x00" + DIGEST, "unknown flags"),
        (b"\x02\x01\x00\x00\x00" + DIGEST, "unknown flags"),
        (b"\x00\x81\x00\x00\x00\x00" + DIGEST, "shortest form"),
        (b"\x00" + b"\xff" * 9 + b"\x02\x00\x00\x00" + DIGEST, "64 bits"),
        (b"\x00" + b"\xff" * 10 + b"\x01\x00\x00\x00" + DIGEST, "64 bits"),
        (b"\x00\x01\x00" + HUGE + b"\x03\x00\x00" + DIGEST, "steps exceed the limit"),
        (b"\x00\x01\x00\x01\x00\x00" + DIGEST, "unknown step 0"),
        (b"\x00\x01\x00\x01\x01" + HUGE + b"\x00" + DIGEST, "ends within a value"),
        (b"\x00\x01\x00\x01\x02\x00" + HUGE + b"\x00" + DIGEST, "ends within a value"),
        (b"\x01\x01\x00" + HUGE + b"\x00" + DIGEST, "ends within a value"),
        (b"\x00\x01\x00\x00\x00" + DIGEST + b"\x00", "1 bytes follow"),
        (b"\x00\x01\x00\x00\x00" + DIGEST[1:], "ends within a value"),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes, reason: str) -> None:
    """Also what says that it is huge: nothing is allocated for a length before the bytes are there."""
    decoder = Decoder()
    decoder.feed(seal(body))
    with pytest.raises(DamagedRecord, match=reason) as caught:
        decoder.next()
    assert caught.value.next_position == len(seal(body))


def test_a_later_version_is_named() -> None:
    decoder = Decoder()
    decoder.feed(seal(b"who knows", version=2) + encode(PLAIN))
    with pytest.raises(DamagedRecord, match="version 2, and this reader knows 1"):
        decoder.next()
    assert decoder.next() == PLAIN


# Making deltas


def test_the_bytes_of_a_plan_are_those_of_the_file() -> None:
    content = bytes(range(100))
    changes = (TruncateTo(50), PatchRange(10, 12), AppendRange(50, 60), TruncateTo(90))
    expected: tuple[Step, ...] = (Truncate(50), Patch(10, content[10:12]), Append(content[50:60]), Truncate(90))
    assert steps_of(changes, lambda at, size: content[at : at + size]) == expected
    with pytest.raises(EOFError, match="shorter than what was noted"):
        steps_of(changes, lambda at, size: content[: size - 1])


def test_the_steps_of_a_replacement() -> None:
    assert steps_of_replacement(Replacement(10, None, 0), b"") == (10, ())
    assert steps_of_replacement(Replacement(10, None, 4), b"more") == (10, (Append(b"more"),))
    assert steps_of_replacement(Replacement(3, (8, 5), 1), b"x") == (13, (Keep(3, 8, 5), Append(b"x")))


# The document


def test_the_document_names_the_constants() -> None:
    document = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
    text = document.split("\n## Deltas\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    fields = {row[2]: row for row in rows if len(row) == 4}
    assert int(fields["magic"][3].strip("`"), 16) == module.MAGIC == encode(PLAIN)[0]
    assert int(fields["version"][3].strip("`")) == module.VERSION == encode(PLAIN)[1]
    assert int(fields["header check"][0]) + int(fields["header check"][1]) == HEADER_BYTES == int(fields["body"][0])
    assert int(fields["checksum"][1]) == CHECKSUM_BYTES
    kinds = {row[0].upper(): int(row[1].strip("`")) for row in rows if len(row) == 4 and row[1][:1] == "`"}
    assert kinds == {kind.name: kind.value for kind in StepKind}
    assert f"`{module.HAS_BORN:#04x}` born, `{module.HAS_PARENT:#04x}` has a parent" in text
    assert f"{RECORD_BYTES_MAX >> 20} MiB (`RECORD_BYTES_MAX`)" in text
    assert f"{STEPS_MAX:,} steps (`STEPS_MAX`)" in text
    assert f"{LENGTH_MAX >> 40} TiB (`LENGTH_MAX`)" in text
    assert digest_bytes(b"").hex() in text
    assert re.search(rf"^\| {module.VERSION} \|", text, re.MULTILINE)
