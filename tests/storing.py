"""A pool in memory, for tests: contents go in as a cut would put them, and what that takes is counted."""

from collections.abc import Iterable

from deltapool.cas.body import Base, base_of, decode, encode
from deltapool.cas.chunk import Digest
from deltapool.cas.chunking import Piece, rechunk
from deltapool.cas.pack import ENTRY_BYTES
from deltapool.cas.recipe import Chunk, Entry, Recipe, replaced
from deltapool.cas.recipe import encode as encode_recipe


class Pool:
    """Chunks by digest, as bodies; a chunk in whose place another one comes is the base of that one."""

    def __init__(self) -> None:
        self.bodies: dict[Digest, bytes] = {}
        self.new_chunks = 0  # by the last content
        self.new_bytes = 0
        self.bytes_stored = 0

    def rewrite(self, data: bytes, old: Recipe | None = None) -> Recipe:
        """Stores a content of which nothing is known but that it may be like an older one."""
        return self.put(rechunk(None, len(data), (), lambda offset, size: data[offset : offset + size]), old)

    def put(self, pieces: Iterable[Piece], old: Recipe | None = None) -> Recipe:
        entries: list[Entry] = []
        fresh: dict[int, bytes] = {}
        for piece in pieces:
            if piece.data is not None:
                fresh[len(entries)] = piece.data
            entries.append(piece.entry)
        recipe, before, self.new_chunks = Recipe(tuple(entries)), self.bytes_stored, 0
        places = {} if old is None else dict(replaced(old, recipe))
        for number, data in fresh.items():
            entry = recipe.entries[number]
            if isinstance(entry, Chunk) and entry.digest not in self.bodies:
                there = places.get(number)
                body = encode(data, base=None if there is None else self.base(there.digest))
                self.bodies[entry.digest] = body
                self.new_chunks += 1
                self.bytes_stored += len(body) + ENTRY_BYTES
        self.bytes_stored += len(encode_recipe(recipe, old))
        self.new_bytes = self.bytes_stored - before
        return recipe

    def base(self, digest: Digest) -> Base:
        """What a delta to this chunk is made on: it, or its own base."""
        root = base_of(self.bodies[digest]) or digest
        return Base(root, decode(self.bodies[root], root))

    def content(self, recipe: Recipe) -> bytes:
        return b"".join(
            self.plain(entry.digest) if isinstance(entry, Chunk) else bytes(entry.length) for entry in recipe.entries
        )

    def plain(self, digest: Digest) -> bytes:
        body = self.bodies[digest]
        root = base_of(body)
        return decode(body, digest, None if root is None else decode(self.bodies[root], root))
