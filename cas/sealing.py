"""Where a journal is cut into chunks: at fixed offsets, so that its sealed part never changes while it grows.

    |64 KiB|      up to 4 MiB      |        4 MiB        |        4 MiB        | . . . |
    head    sealed chunks, each its own object                                  the rest

Heads are read often, so the first 64 KiB are a chunk of their own. zstd over 4 MiB finds the record that an agent
repeats each turn. The rest, less than 4 MiB, is cut where its content says (`chunking`), since it will be stored again.
"""

from collections.abc import Iterator
from typing import Final

from deltapool.cas.chunk import CHUNK_BYTES_MAX, digest_of
from deltapool.cas.chunking import Piece, rechunk
from deltapool.cas.digest import Read
from deltapool.cas.recipe import Chunk, Recipe

HEAD_BYTES: Final = 64 << 10
SEGMENT_BYTES: Final = CHUNK_BYTES_MAX


def sealed_length(length: int) -> int:
    """How much of a journal lies in chunks that are final while it only grows."""
    full = length - length % SEGMENT_BYTES
    return full or (HEAD_BYTES if length >= HEAD_BYTES else 0)


def sealed(old: Recipe | None, length: int, dirty_from: int, read: Read) -> Iterator[Piece]:
    """The pieces of a journal's first `length` bytes. Below `dirty_from` they are those of `old`."""
    at = 0
    while at < sealed_length(length):
        end = HEAD_BYTES if at == 0 else at - at % SEGMENT_BYTES + SEGMENT_BYTES
        kept = None if end > dirty_from else _kept(old, at, end - at)
        if kept is not None:
            yield Piece(at, kept)
        else:
            data = read(at, end - at)
            yield Piece(at, Chunk(digest_of(data), end - at), data)
        at = end
    if at == length:
        return
    base = _rest(old, at)
    dirty = [(max(dirty_from - at, 0), length - at)] if dirty_from < length else []
    for piece in rechunk(base, length - at, dirty, lambda offset, size: read(at + offset, size)):
        yield Piece(at + piece.offset, piece.entry, piece.data)


def _kept(old: Recipe | None, offset: int, length: int) -> Chunk | None:
    if old is None or offset >= old.length:
        return None
    index = old.index(offset)
    entry = old.entries[index]
    fits = old.starts[index] == offset and isinstance(entry, Chunk) and entry.length == length
    return entry if fits and isinstance(entry, Chunk) else None


def _rest(old: Recipe | None, offset: int) -> Recipe | None:
    """What an old recipe says from `offset` on, if it was cut there."""
    if old is None or offset >= old.length:
        return None
    index = old.index(offset)
    return Recipe(old.entries[index:]) if old.starts[index] == offset else None
