"""A pack: many small bodies in one object, and a footer that says where each is. `docs/format.md` has the layout.

The bodies come first, one after the other, then the footer, then a trailer of fixed size: so a pack is written in one
go, and whoever finds one reads its last bytes and knows all of it. A pack that was not written to its end has no
trailer. Footer and trailer prove themselves; the bodies prove themselves when they are decoded. A pack is named by the
SHA-256 of all of its bytes, and never changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NewType

import xxhash

from deltapool.cas.body import BODY_BYTES_MAX, BODY_BYTES_MIN
from deltapool.cas.chunk import CHUNK_DIGEST_BYTES, Digest, digest_of

PackName = NewType("PackName", bytes)
"""SHA-256 of all bytes of a pack."""

MAGIC: Final = b"dpPACK"
VERSION: Final = 1
ENTRY_BYTES: Final = CHUNK_DIGEST_BYTES + 8
TRAILER_BYTES: Final = 24
PACK_BYTES_MAX: Final = 64 << 20
PACK_BYTES_TARGET: Final = 8 << 20
TAIL_BYTES: Final = 128 << 10
"""A tail worth reading first: it has the whole index of a pack of 3,000 bodies."""


@dataclass(frozen=True, slots=True)
class PackEntry:
    digest: Digest
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Pack:
    name: PackName
    data: bytes
    entries: tuple[PackEntry, ...]


@dataclass(frozen=True, slots=True)
class NeedTail:
    """The index is sound so far, and takes that many of the pack's last bytes."""

    tail_bytes: int


class DamagedPack(ValueError):
    """What was read is not the end of a pack."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"damaged pack: {reason}")
        self.reason = reason


class PackBuilder:
    """Add bodies until `full`, then `finish`."""

    def __init__(self) -> None:
        self._bodies: list[bytes] = []
        self._entries: list[PackEntry] = []
        self._digests: set[Digest] = set()
        self._end = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._digests

    @property
    def size(self) -> int:
        """In bytes, if it were finished now."""
        return _size(self._end, len(self._entries))

    @property
    def full(self) -> bool:
        return self.size >= PACK_BYTES_TARGET

    def has_room(self, body_bytes: int) -> bool:
        return _size(self._end + body_bytes, len(self._entries) + 1) <= PACK_BYTES_MAX

    def add(self, digest: Digest, body: bytes) -> int:
        """The offset of the body in the pack. ValueError if it is none, is there already or has no room."""
        if len(digest) != CHUNK_DIGEST_BYTES or not BODY_BYTES_MIN <= len(body) <= BODY_BYTES_MAX:
            raise ValueError(f"no body: {len(body)} bytes under a digest of {len(digest)}")
        if digest in self._digests:
            raise ValueError(f"chunk {digest.hex()} is in this pack already")
        if not self.has_room(len(body)):
            raise ValueError(f"a pack of {self.size} bytes has no room for {len(body)} more")
        offset = self._end
        self._bodies.append(body)
        self._entries.append(PackEntry(digest, offset, len(body)))
        self._digests.add(digest)
        self._end += len(body)
        return offset

    def finish(self) -> Pack:
        if not self._entries:
            raise ValueError("a pack holds at least one body")
        footer = b"".join(
            entry.digest + entry.offset.to_bytes(4, "big") + entry.length.to_bytes(4, "big") for entry in self._entries
        )
        data = b"".join((*self._bodies, footer, _trailer(footer)))
        return Pack(PackName(digest_of(data)), data, tuple(self._entries))


def read_index(tail: bytes, pack_bytes: int) -> tuple[PackEntry, ...] | NeedTail:
    """Where the bodies of a pack of `pack_bytes` bytes are, by its last bytes. DamagedPack if it is none."""
    if not TRAILER_BYTES <= pack_bytes <= PACK_BYTES_MAX:
        raise DamagedPack(f"no pack has {pack_bytes} bytes")
    if len(tail) > pack_bytes:
        raise ValueError(f"{len(tail)} last bytes of {pack_bytes}")
    if len(tail) < TRAILER_BYTES:
        return NeedTail(TRAILER_BYTES)
    trailer = tail[-TRAILER_BYTES:]
    if trailer[16:22] != MAGIC:
        raise DamagedPack("it does not end as one")
    if (version := int.from_bytes(trailer[22:], "big")) != VERSION:
        raise DamagedPack(f"it is of version {version}, and this reader knows {VERSION}")
    count, footer_bytes = int.from_bytes(trailer[:4], "big"), int.from_bytes(trailer[4:8], "big")
    if not count or footer_bytes != count * ENTRY_BYTES or footer_bytes + TRAILER_BYTES > pack_bytes:
        raise DamagedPack(f"a footer of {footer_bytes} bytes for {count} bodies in {pack_bytes} bytes")
    if len(tail) < footer_bytes + TRAILER_BYTES:
        return NeedTail(footer_bytes + TRAILER_BYTES)
    footer = tail[-footer_bytes - TRAILER_BYTES : -TRAILER_BYTES]
    if trailer != _trailer(footer):
        raise DamagedPack("the checksum of its footer does not match")
    return _checked(tuple(_entries(footer)), pack_bytes - footer_bytes - TRAILER_BYTES)


def _entries(footer: bytes) -> Iterator[PackEntry]:
    for at in range(0, len(footer), ENTRY_BYTES):
        digest, numbers = footer[at : at + CHUNK_DIGEST_BYTES], footer[at + CHUNK_DIGEST_BYTES : at + ENTRY_BYTES]
        yield PackEntry(Digest(digest), int.from_bytes(numbers[:4], "big"), int.from_bytes(numbers[4:], "big"))


def _checked(entries: tuple[PackEntry, ...], bodies_bytes: int) -> tuple[PackEntry, ...]:
    end = 0
    for entry in entries:
        if entry.offset != end or not BODY_BYTES_MIN <= entry.length <= BODY_BYTES_MAX:
            raise DamagedPack(f"a body of {entry.length} bytes at {entry.offset}, where the one before ends at {end}")
        end += entry.length
    if end != bodies_bytes:
        raise DamagedPack(f"its bodies end at {end}, its footer begins at {bodies_bytes}")
    if len({entry.digest for entry in entries}) != len(entries):
        raise DamagedPack("it names a chunk twice")
    return entries


def _size(bodies_bytes: int, count: int) -> int:
    return bodies_bytes + count * ENTRY_BYTES + TRAILER_BYTES


def _trailer(footer: bytes) -> bytes:
    numbers = (len(footer) // ENTRY_BYTES).to_bytes(4, "big") + len(footer).to_bytes(4, "big")
    return numbers + xxhash.xxh3_64_digest(footer) + MAGIC + VERSION.to_bytes(2, "big")
