"""The pool's index: which chunk is where. SQLite; the mover is its only writer, everybody may read.

A row is committed after the file that it names is durable, and deleted before that file goes: what the index says is
there, and what is there without it is a leftover.
"""

import pathlib
from typing import Final, NamedTuple

import apsw

from deltapool.cas.chunk import Digest
from deltapool.cas.pack import Pack, PackName

APPLICATION_ID: Final = 0x64707078  # "dppx"
FORMAT: Final = 1
SCHEMA: Final = """
CREATE TABLE chunk(digest BLOB PRIMARY KEY, pack INTEGER, offset INTEGER NOT NULL, length INTEGER NOT NULL,
  plain INTEGER NOT NULL, base BLOB) WITHOUT ROWID;
CREATE INDEX chunk_pack ON chunk(pack) WHERE pack IS NOT NULL;
CREATE TABLE pack(id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, bytes INTEGER NOT NULL);
"""


class Place(NamedTuple):
    """`pack` is the number of the pack that has the body, None if it is an object of its own."""

    pack: int | None
    offset: int
    length: int
    plain: int
    base: Digest | None


class PoolError(Exception):
    """The pool cannot be used; the text says why and what to do."""


_PLACE: Final = "pack, offset, length, plain, base"


class Index:
    def __init__(self, path: pathlib.Path, *, writable: bool) -> None:
        """Raises PoolError if this is no index, or one of a newer deltapool."""
        self.connection = _open(path, writable=writable)
        self._execute = self.connection.execute
        application, version = self.connection.pragma("application_id"), self.connection.pragma("user_version")
        if writable and not version and not application:
            self.connection.pragma("journal_mode", "WAL")
            with self.connection:
                self._execute(SCHEMA)
                self.connection.pragma("application_id", APPLICATION_ID)
                self.connection.pragma("user_version", FORMAT)
        elif application != APPLICATION_ID or version > FORMAT:
            raise PoolError(f"{path} is no index of a pool, or one of a newer deltapool (format {version}): upgrade")
        if writable:
            self.connection.pragma("synchronous", "FULL")

    def begin(self) -> None:
        if not self.connection.in_transaction:
            self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """What it says is durable."""
        if self.connection.in_transaction:
            self._execute("COMMIT")

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self._execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()

    # --- chunks and packs

    def find(self, digest: Digest) -> Place | None:
        row = self._execute(f"SELECT {_PLACE} FROM chunk WHERE digest = ?", (digest,)).fetchone()
        return Place(*row) if row else None

    def add_object(self, digest: Digest, length: int, plain: int) -> None:
        self._execute("INSERT OR REPLACE INTO chunk VALUES (?, NULL, 0, ?, ?, NULL)", (digest, length, plain))

    def add_pack(self, pack: Pack, facts: dict[Digest, tuple[int, Digest | None]]) -> int:
        """A pack and its chunks; `facts` has the length of each one's plaintext, and its base."""
        self._execute("INSERT OR IGNORE INTO pack(name, bytes) VALUES (?, ?)", (pack.name, len(pack.data)))
        number = int(self._execute("SELECT id FROM pack WHERE name = ?", (pack.name,)).get)
        self.connection.executemany(
            "INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?, ?)",
            [(each.digest, number, each.offset, each.length, *facts[each.digest]) for each in pack.entries],
        )
        return number

    def pack_name(self, number: int) -> PackName | None:
        return self._execute("SELECT name FROM pack WHERE id = ?", (number,)).get  # type: ignore[no-any-return]

    def packs(self) -> list[tuple[int, PackName, int]]:
        return list(self._execute("SELECT id, name, bytes FROM pack ORDER BY id"))

    def in_pack(self, number: int) -> list[tuple[Digest, Place]]:
        rows = self._execute(f"SELECT digest, {_PLACE} FROM chunk WHERE pack = ? ORDER BY offset", (number,))
        return [(digest, Place(*rest)) for digest, *rest in rows]

    def chunks(self) -> list[tuple[Digest, Place]]:
        rows = self._execute(f"SELECT digest, {_PLACE} FROM chunk")
        return [(digest, Place(*rest)) for digest, *rest in rows]

    def remove_chunks(self, digests: list[Digest]) -> None:
        self.connection.executemany("DELETE FROM chunk WHERE digest = ?", [(digest,) for digest in digests])

    def remove_pack(self, number: int) -> None:
        self._execute("DELETE FROM pack WHERE id = ?", (number,))

    def figures(self) -> tuple[int, int, int]:
        """Chunks, bytes of their plaintexts, bytes that they take up: own objects, and packs as they are."""
        ((chunks, plain, own),) = self._execute(
            "SELECT count(*), coalesce(sum(plain), 0), coalesce(sum(length) FILTER (WHERE pack IS NULL), 0) FROM chunk"
        )
        packed = self._execute("SELECT coalesce(sum(bytes), 0) FROM pack").get
        return int(chunks), int(plain), int(own) + int(packed)


def _open(path: pathlib.Path, *, writable: bool) -> apsw.Connection:
    if writable:
        connection = apsw.Connection(str(path))
    else:
        try:
            connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            connection.pragma("user_version")
        except apsw.Error:  # a full disk has no room for the log's index: then nobody writes either
            uri = f"file:{path}?immutable=1"
            try:
                connection = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
                connection.pragma("user_version")
            except apsw.Error as error:
                raise PoolError(f"{path} cannot be read: {error}") from None
    connection.set_busy_timeout(5_000)
    return connection
