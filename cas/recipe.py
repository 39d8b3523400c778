"""A recipe: the ordered chunks and holes of one content. `docs/format.md` has the layout of its record.

A recipe is a value. It holds no piece without bytes and no two holes in a row, so what it says of a content it says in
one way. A hole reads as zeros and is stored nowhere.

A digest takes 32 bytes that nothing compresses, and the recipe of a file that is rewritten again and again is nearly
the one before. So a record may be made on a base, another recipe: it copies runs of the base's entries, and names only
the chunks that are new. It reads on that very base and on no other. Who makes one on the other says how long such a
chain may get; a record without a base stands alone.

A record proves itself: a checksum over all of it, lengths that add up, nothing left over.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import xxhash

from deltapool.cas.chunk import CHUNK_BYTES_MAX, CHUNK_DIGEST_BYTES, Digest
from deltapool.cas.wire import Cursor, Malformed, varint

MAGIC: Final = 0xDC
VERSION: Final = 1
HAS_BASE: Final = 0x01
CHECKSUM_BYTES: Final = 8
KIND_CHUNK: Final = 0
KIND_HOLE: Final = 1
KIND_COPY: Final = 2
ENTRIES_MAX: Final = 1 << 22
LENGTH_MAX: Final = (1 << 62) - 1
_HEADER_BYTES: Final = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    digest: Digest
    length: int


@dataclass(frozen=True, slots=True)
class Hole:
    length: int


Entry = Chunk | Hole


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes of an entry, from its byte `start` on: those of the content at `offset`."""

    offset: int
    entry: Entry
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Run:
    """The entries [first, last), which another recipe has from `start` on, or not."""

    first: int
    last: int
    start: int | None


class DamagedRecipe(ValueError):
    """This record is no recipe, or not on this base."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """ValueError if it is none: a piece without bytes, holes in a row, beyond the limits."""

    entries: tuple[Entry, ...] = ()
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The offset of each entry in the content."""
    length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at, after_hole = 0, False
        starts: list[int] = []
        for entry in self.entries:
            starts.append(at)
            hole = isinstance(entry, Hole)
            if entry.length < 1 or (isinstance(entry, Chunk) and entry.length > CHUNK_BYTES_MAX):
                raise ValueError(f"no piece of a content has {entry.length} bytes")
            if isinstance(entry, Chunk) and len(entry.digest) != CHUNK_DIGEST_BYTES:
                raise ValueError(f"a digest has {CHUNK_DIGEST_BYTES} bytes, not {len(entry.digest)}")
            if hole and after_hole:
                raise ValueError("two holes in a row are one")
            at, after_hole = at + entry.length, hole
        if len(starts) > ENTRIES_MAX or at > LENGTH_MAX:
            raise ValueError(f"{len(starts)} pieces of {at} bytes exceed the limits of a recipe")
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "length", at)

    def chunks(self) -> Iterator[Chunk]:
        """In order; one that occurs twice comes twice."""
        return (entry for entry in self.entries if isinstance(entry, Chunk))

    def index(self, offset: int) -> int:
        """The number of the entry that has the byte at `offset`."""
        if not 0 <= offset < self.length:
            raise IndexError(f"no byte at {offset} of {self.length}")
        return bisect_right(self.starts, offset) - 1

    def parts(self, start: int, end: int) -> Iterator[Part]:
        """What [start, end) is made of, as far as the content goes."""
        end = min(end, self.length)
        if not 0 <= start < end:
            return
        for at in range(self.index(start), len(self.entries)):
            entry, begin = self.entries[at], self.starts[at]
            if begin >= end:
                return
            first, last = max(start, begin), min(end, begin + entry.length)
            yield Part(first, entry, first - begin, last - first)


def recipe_of(entries: Iterable[Entry]) -> Recipe:
    """The recipe of these entries; holes in a row become one."""
    joined: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Hole) and joined and isinstance(joined[-1], Hole):
            entry = Hole(joined.pop().length + entry.length)
        joined.append(entry)
    return Recipe(tuple(joined))


def replaced(old: Recipe, new: Recipe) -> Iterator[tuple[int, Chunk]]:
    """(number of an entry of `new`, the chunk of `old` in whose place it is), for chunks that `old` does not have.

    What lies between two runs that both have is taken to have become what lies there now, in proportion.
    """
    runs = _runs(new, old)
    old_first = 0
    for run, after in zip_longest(runs, runs[1:]):
        if run.start is not None:
            old_first = run.start + run.last - run.first
            continue
        old_last = len(old.entries) if after is None or after.start is None else after.start
        if old_first >= old_last:
            continue  # something came between, and nothing went
        old_start, old_end = old.starts[old_first], _end(old, old_last - 1)
        new_start, new_end = new.starts[run.first], _end(new, run.last - 1)
        for index in range(run.first, run.last):
            middle = new.starts[index] + new.entries[index].length // 2 - new_start
            there = old.entries[old.index(old_start + middle * (old_end - old_start) // (new_end - new_start))]
            if isinstance(new.entries[index], Chunk) and isinstance(there, Chunk):
                yield index, there


def _end(recipe: Recipe, index: int) -> int:
    return recipe.starts[index] + recipe.entries[index].length


# The codec.


def encode(recipe: Recipe, base: Recipe | None = None) -> bytes:
    """The record of a recipe: one that stands alone, or one on a base."""
    fields = [bytes((MAGIC, VERSION, 0 if base is None else HAS_BASE)), varint(recipe.length)]
    if base is not None:
        fields.append(_checksum(base))
    fields.append(varint(len(recipe.entries)))
    runs = [_Run(0, len(recipe.entries), None)] if base is None else _runs(recipe, base)
    for run in runs:
        if run.start is not None:
            fields += varint((run.last - run.first) << 2 | KIND_COPY), varint(run.start)
            continue
        for entry in recipe.entries[run.first : run.last]:
            if isinstance(entry, Chunk):
                fields += varint(entry.length << 2 | KIND_CHUNK), entry.digest
            else:
                fields.append(varint(entry.length << 2 | KIND_HOLE))
    record = b"".join(fields)
    return record + xxhash.xxh3_64_digest(record)


def decode(record: bytes, base: Recipe | None = None) -> Recipe:
    """The recipe of a record; `base` is asked for only by one that was made on it. DamagedRecipe if it is none."""
    try:
        return _decode(record, base)
    except (Malformed, ValueError) as error:
        raise DamagedRecipe(f"damaged recipe: {error}") from None


def needs_base(record: bytes) -> bool:
    """Whether a record was made on a base. Of a damaged one it may say anything."""
    return len(record) >= _HEADER_BYTES and bool(record[2] & HAS_BASE)


def _decode(record: bytes, base: Recipe | None) -> Recipe:
    if len(record) < _HEADER_BYTES + CHECKSUM_BYTES or record[0] != MAGIC:
        raise Malformed("it does not begin as one")
    with memoryview(record) as view:
        if xxhash.xxh3_64_digest(view[:-CHECKSUM_BYTES]) != record[-CHECKSUM_BYTES:]:
            raise Malformed("its checksum does not match")
        if record[1] != VERSION:
            raise Malformed(f"it is of version {record[1]}, and this reader knows {VERSION}")
        if record[2] not in (0, HAS_BASE):
            raise Malformed(f"unknown flags {record[2]:#04x}")
        cursor = Cursor(view[_HEADER_BYTES:-CHECKSUM_BYTES])
        length = cursor.varint()
        available: tuple[Entry, ...] = ()
        if record[2] & HAS_BASE:
            if cursor.bytes(CHECKSUM_BYTES) != (b"" if base is None else _checksum(base)):
                raise Malformed("it was made on another base")
            available = () if base is None else base.entries
        recipe = Recipe(tuple(_entries(cursor, available)))
        cursor.end()
    if recipe.length != length:
        raise Malformed(f"its pieces have {recipe.length} bytes, not {length}")
    return recipe


def _entries(cursor: Cursor, base: tuple[Entry, ...]) -> list[Entry]:
    count = cursor.varint()
    if count > ENTRIES_MAX:
        raise Malformed(f"{count} pieces exceed the limit of {ENTRIES_MAX}")
    entries: list[Entry] = []
    while len(entries) < count:
        value, kind = divmod(cursor.varint(), 4)
        if kind == KIND_CHUNK:
            entries.append(Chunk(Digest(cursor.bytes(CHUNK_DIGEST_BYTES)), value))
        elif kind == KIND_HOLE:
            entries.append(Hole(value))
        elif kind == KIND_COPY:
            start = cursor.varint()
            if not 0 < value <= count - len(entries) or start + value > len(base):
                raise Malformed(f"it copies {value} pieces from number {start} on, which are not there")
            entries += base[start : start + value]
        else:
            raise Malformed(f"unknown kind of piece {kind}")
    return entries


def _checksum(recipe: Recipe) -> bytes:
    """Names a base: the checksum of its record that stands alone."""
    return encode(recipe)[-CHECKSUM_BYTES:]


def _runs(recipe: Recipe, base: Recipe) -> list[_Run]:
    """The recipe as runs that the base has too and runs that it does not have."""
    places: dict[Entry, int] = {}
    for at, entry in enumerate(base.entries):
        if isinstance(entry, Chunk):
            places.setdefault(entry, at)
    ours, theirs = recipe.entries, base.entries
    runs: list[_Run] = []
    at = expected = 0
    while at < len(ours):
        follows = expected < len(theirs) and theirs[expected] == ours[at]
        start = expected if follows else places.get(ours[at])
        first = at
        at += 1
        if start is None:
            expected += 1  # a new piece stands for one of the base
            if runs and runs[-1].start is None:
                first = runs.pop().first
        else:
            expected = start + 1
            while at < len(ours) and expected < len(theirs) and ours[at] == theirs[expected]:
                at, expected = at + 1, expected + 1
        runs.append(_Run(first, at, start))
    return runs
