"""A chunk's body: one chunk as it is stored, in a pack or as an object of its own. `docs/format.md` has its layout.

The plaintext is a zstd frame, or as it is if the frame would not be smaller: a body is never larger than its plaintext
and the header. `decode` proves what it returns: whatever happened to the body, it gives the bytes whose digest was
asked for, or raises DamagedChunk with the reason. Nothing is allocated on the word of a damaged or hostile body: the
header's length is at most CHUNK_BYTES_MAX, and a frame that announces another length is refused before it is read.

A compressor is made for each call. It costs nothing that can be measured, and calls from several threads share nothing.
"""

import enum
from typing import Final

import zstandard

from deltapool.cas.chunk import CHUNK_BYTES_MAX, Digest, digest_of

MAGIC: Final = 0xDB
FORMAT: Final = 1
HEADER_BYTES: Final = 8
NO_KEY: Final = 0
BODY_BYTES_MIN: Final = HEADER_BYTES + 1
BODY_BYTES_MAX: Final = HEADER_BYTES + CHUNK_BYTES_MAX
LEVEL: Final = 3


class Codec(enum.IntEnum):
    RAW = 0
    ZSTD = 1


class DamagedChunk(ValueError):
    """The body of the chunk with this digest does not hold it."""

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(f"chunk {digest.hex()} is damaged: {reason}")
        self.digest, self.reason = digest, reason


class _Unsound(Exception):
    pass


def encode(plain: bytes, level: int = LEVEL) -> bytes:
    """The body of a chunk. The same plaintext may have many; all of them are the same chunk."""
    if not 0 < len(plain) <= CHUNK_BYTES_MAX:
        raise ValueError(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes, not {len(plain)}")
    frame = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(plain)
    codec, payload = (Codec.ZSTD, frame) if len(frame) < len(plain) else (Codec.RAW, plain)
    return bytes((MAGIC, FORMAT, codec, NO_KEY)) + len(plain).to_bytes(4, "big") + payload


def decode(body: bytes, digest: Digest) -> bytes:
    """The plaintext with this digest. DamagedChunk if the body does not hold it."""
    try:
        plain = _plain(body)
    except _Unsound as error:
        raise DamagedChunk(digest, str(error)) from None
    if digest_of(plain) != digest:
        raise DamagedChunk(digest, f"the SHA-256 of its plaintext is {digest_of(plain).hex()}")
    return plain


def _plain(body: bytes) -> bytes:
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
            return _decompressed(payload, length)
        case _:
            raise _Unsound(f"unknown codec {codec}")


def _decompressed(frame: bytes, length: int) -> bytes:
    if len(frame) >= length:
        raise _Unsound(f"a frame of {len(frame)} bytes for {length} bytes: it would have been stored raw")
    try:
        announced = zstandard.frame_content_size(frame)  # -1: the frame does not say
        if announced != length:
            raise _Unsound(f"its header promises {length} bytes, its zstd frame {announced}")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _Unsound(f"zstd: {error}") from None
    if len(plain) != length:
        raise _Unsound(f"its header promises {length} bytes, its zstd frame had {len(plain)}")
    return plain
