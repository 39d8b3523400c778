"""A chunk's body: one chunk as it is stored, in a pack or as an object of its own. `docs/format.md` has its layout.

The plaintext is a zstd frame, or as it is if the frame would not be smaller: a body is never larger than its plaintext
and the header. `decode` proves what it returns: whatever happened to the body, it gives the bytes whose digest was
asked for, or raises DamagedChunk with the reason. Nothing is allocated on the word of a damaged or hostile body: the
header's length is at most CHUNK_BYTES_MAX, and a frame that announces another length is refused before it is read.

A new chunk is often nearly one that is there: a line of a file changed, the file was written again. Its body may be a
*delta*: its frame was made with the plaintext of another chunk, its base, as zstd's dictionary, and is read with it. A
base is never a delta itself, so reading a chunk takes two bodies at most; who removes chunks keeps the bases of those
that stay. `recipe.replaced` finds bases.

A compressor is made for each call. It costs nothing that can be measured, and calls from several threads share nothing.
"""

import enum
from dataclasses import dataclass
from typing import Final

import zstandard

from deltapool.cas.chunk import CHUNK_BYTES_MAX, CHUNK_DIGEST_BYTES, Digest, digest_of

MAGIC: Final = 0xDB
FORMAT: Final = 1
HEADER_BYTES: Final = 8
NO_KEY: Final = 0
BODY_BYTES_MIN: Final = HEADER_BYTES + 1
BODY_BYTES_MAX: Final = HEADER_BYTES + CHUNK_BYTES_MAX
LEVEL: Final = 3
DELTA_BYTES_MAX: Final = 256 << 10
"""The longest plaintext of a delta, and of a base."""
_BASE_BYTES_MIN: Final = 8  # less is no dictionary for zstd
_DELTA_BYTES_MIN: Final = HEADER_BYTES + CHUNK_DIGEST_BYTES


class Codec(enum.IntEnum):
    RAW = 0
    ZSTD = 1
    DELTA = 2


@dataclass(frozen=True, slots=True)
class Base:
    digest: Digest
    plain: bytes


class DamagedChunk(ValueError):
    """The body of the chunk with this digest does not hold it."""

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(f"chunk {digest.hex()} is damaged: {reason}")
        self.digest, self.reason = digest, reason


class _Unsound(Exception):
    pass


def encode(plain: bytes, level: int = LEVEL, base: Base | None = None) -> bytes:
    """The body of a chunk: a delta to `base` if that saves a quarter, else one that stands alone.

    The base must not be stored as a delta itself. A plaintext may have many bodies; all of them are the same chunk.
    """
    if not 0 < len(plain) <= CHUNK_BYTES_MAX:
        raise ValueError(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes, not {len(plain)}")
    frame = _compressed(plain, level, None)
    codec, payload = (Codec.ZSTD, frame) if len(frame) < len(plain) else (Codec.RAW, plain)
    if base is not None and _may_be_delta(len(plain)) and _may_be_base(len(base.plain)):
        delta = base.digest + _compressed(plain, level, base.plain)
        if 4 * len(delta) <= 3 * len(payload):
            codec, payload = Codec.DELTA, delta
    return bytes((MAGIC, FORMAT, codec, NO_KEY)) + len(plain).to_bytes(4, "big") + payload


def base_of(body: bytes) -> Digest | None:
    """The chunk whose plaintext `decode` needs. Of a damaged body it may say anything."""
    if len(body) < _DELTA_BYTES_MIN or body[2] != Codec.DELTA:
        return None
    return Digest(body[HEADER_BYTES:_DELTA_BYTES_MIN])


def decode(body: bytes, digest: Digest, base: bytes | None = None) -> bytes:
    """The plaintext with this digest; `base` is the plaintext of what `base_of` says. DamagedChunk if there is none."""
    try:
        plain = _plain(body, base)
    except _Unsound as error:
        raise DamagedChunk(digest, str(error)) from None
    if digest_of(plain) != digest:
        raise DamagedChunk(digest, f"the SHA-256 of its plaintext is {digest_of(plain).hex()}")
    return plain


def _plain(body: bytes, base: bytes | None) -> bytes:
    if len(body) < HEADER_BYTES:
        raise _Unsound(f"{len(body)} bytes are no header")
    magic, form, codec, key = body[:4]
    length = int.from_bytes(body[4:HEADER_BYTES], "big")
    if magic != MAGIC:
        raise _Unsound(f"it begins with {magic:#04x}, not {MAGIC:#04x}")
    if form != FORMAT:
        raise _Unsound(f"it is of format {form}, and this reader knows {FORMAT}")
    if key != NO_KEY:
        raise _Unsound(f"it needs key {key}, and this reader has none")
    if not 0 < length <= CHUNK_BYTES_MAX:
        raise _Unsound(f"its header promises {length} bytes, and a chunk has 1 to {CHUNK_BYTES_MAX}")
    payload = body[HEADER_BYTES:]
    match codec:
        case Codec.RAW:
            if len(payload) != length:
                raise _Unsound(f"its header promises {length} bytes, and {len(payload)} follow")
            return payload
        case Codec.ZSTD:
            return _decompressed(payload, length, None)
        case Codec.DELTA:
            return _decompressed_on(payload, length, base)
        case _:
            raise _Unsound(f"unknown codec {codec}")


def _decompressed_on(payload: bytes, length: int, base: bytes | None) -> bytes:
    if len(payload) < CHUNK_DIGEST_BYTES or not _may_be_delta(length):
        raise _Unsound(f"no delta: {len(payload)} bytes for {length}")
    if base is None or not _may_be_base(len(base)):
        raise _Unsound(f"its base {payload[:CHUNK_DIGEST_BYTES].hex()} is missing")
    return _decompressed(payload[CHUNK_DIGEST_BYTES:], length, base)


def _decompressed(frame: bytes, length: int, base: bytes | None) -> bytes:
    if len(frame) >= length:
        raise _Unsound(f"a frame of {len(frame)} bytes for {length} bytes: it would have been stored raw")
    try:
        announced = zstandard.frame_content_size(frame)  # -1: the frame does not say
        if announced != length:
            raise _Unsound(f"its header promises {length} bytes, its zstd frame {announced}")
        decompressor = zstandard.ZstdDecompressor(dict_data=_dictionary(base))
        plain = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _Unsound(f"zstd: {error}") from None
    if len(plain) != length:
        raise _Unsound(f"its header promises {length} bytes, its zstd frame had {len(plain)}")
    return plain


def _compressed(plain: bytes, level: int, base: bytes | None) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, dict_data=_dictionary(base), write_checksum=False)
    return compressor.compress(plain)


def _dictionary(base: bytes | None) -> zstandard.ZstdCompressionDict | None:
    return None if base is None else zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _may_be_delta(plain_bytes: int) -> bool:
    return plain_bytes <= DELTA_BYTES_MAX


def _may_be_base(plain_bytes: int) -> bool:
    return _BASE_BYTES_MIN <= plain_bytes <= DELTA_BYTES_MAX
