"""The tree over SQLite: inodes, names, symlinks, xattrs, and the local notes about live files.

Statements only: what a syscall means is decided above (`names`, `files`), what is durable below (`database`).
Mutations are made inside `database.operation()`, or inside a transaction opened by `database.begin()` for local
notes. Names are bytes.

Inode rows are written behind: `touch` remembers an inode, and its row is written once, just before the COMMIT.

A name is private, kept in a table that never travels, if its inode may not travel (host, cache) or if the name itself
lies where such files live. Inode numbers are never reused: they are handed out from blocks that are reserved durably
first.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from deltapool.cas.digest import ZERO_SEGMENT_DIGEST
from deltapool.fs.classes import FileClass
from deltapool.fs.config import Limits
from deltapool.fs.database import Database
from deltapool.fs.inode import ROOT, Ino, Inode
from deltapool.fs.stats import JournalCounts

EPOCH_SHIFT = 40
INODE_BLOCK = 4096
INODE_GAP = 1 << 20  # more than the numbers whose use a power cut can take back
CUT = 1  # the cut to which changes belong; the first one has not been made yet
PRIVATE = (FileClass.HOST, FileClass.CACHE)

NULS, NULS_TRUNCATING = 1, 2  # `nuls` of a journal: there may be some; it is being truncated, too, to its durable bytes

_JOURNAL = "length, digest, lines, nuls, durable, appended, written, changed, read, folded"
_INODE = "ino, mode, uid, gid, nlink, rdev, size, atime, mtime, ctime, class"


class Name(NamedTuple):
    """One directory entry. `id` orders a directory and is never reused."""

    id: int
    parent: Ino
    name: bytes
    ino: Ino


class LiveNote(NamedTuple):
    """size, mtime and ctime (ns) of a live file when it was last known to be durable and clean."""

    size: int
    mtime_ns: int
    ctime_ns: int


class JournalNote(NamedTuple):
    """What was durable of a journal when it was last noted, and the counts of its life. See docs/format.md."""

    length: int
    digest: bytes
    lines: int
    nuls: int
    durable: int  # bytes known to survive a power cut; kept exact only where there are NULs
    appended_ns: int
    written: int
    changed: int
    read: int
    folded: int


class Namespace:
    def __init__(self, path: pathlib.Path, limits: Limits, now_ns: int) -> None:
        self.database = Database(path, limits)
        self._execute = self.database.connection.execute
        self._touched: dict[Ino, Inode] = {}
        self.database.before_commit = self._write_touched
        if self.meta("epoch") is None:
            self._create_root(now_ns)
        self._next_ino = int(self.meta("next_ino") or 0)
        self._reserved_until = self._next_ino
        highest = self._execute(
            "SELECT max((SELECT coalesce(max(id),0) FROM dentry), (SELECT coalesce(max(id),0) FROM private_dentry))"
        ).get
        self._next_entry = int(highest) + 1

    def _create_root(self, now_ns: int) -> None:
        self.database.begin()
        self._execute("INSERT INTO meta VALUES ('epoch', 1), ('next_ino', ?), ('clean', 1)", (1 << EPOCH_SHIFT,))
        owner = (os.geteuid(), os.getegid())
        self._execute(
            f"INSERT INTO inode({_INODE}, cut) VALUES (?, ?, ?, ?, 2, 0, 0, ?, ?, ?, 0, ?)",
            (ROOT, 0o40755, *owner, now_ns, now_ns, now_ns, CUT),
        )
        self.database.commit()

    def meta(self, key: str) -> int | str | None:
        return self._execute("SELECT value FROM meta WHERE key = ?", (key,)).get  # type: ignore[no-any-return]

    def set_meta(self, key: str, value: int | str) -> None:
        self.database.begin()
        self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # --- inodes

    def new_ino(self) -> Ino:
        """A number that no inode of this volume has had. Inside an operation."""
        if self._next_ino >= self._reserved_until:
            self._reserved_until = self._next_ino + INODE_BLOCK
            self._execute("UPDATE meta SET value = ? WHERE key = 'next_ino'", (self._reserved_until,))
        self._next_ino += 1
        return Ino(self._next_ino - 1)

    def skip_numbers(self) -> None:
        """After an unclean stop: numbers that were in use, as far as that has been forgotten, stay behind."""
        self._next_ino = self._reserved_until = self._next_ino + INODE_GAP
        self.set_meta("next_ino", self._next_ino)

    @property
    def next_ino(self) -> int:
        """All inode numbers of earlier mounts are below it."""
        return self._next_ino

    def load(self, ino: Ino) -> Inode | None:
        row = self._execute(f"SELECT {_INODE} FROM inode WHERE ino = ?", (ino,)).fetchone()
        return _inode(row) if row else None

    def touch(self, inode: Inode) -> None:
        """The row of `inode` is to be written before the COMMIT of the open transaction. Inside an operation."""
        inode.transaction = self.database.current
        self._touched[inode.ino] = inode

    def _write_touched(self) -> None:
        if self._touched:
            self.database.connection.executemany(
                f"INSERT OR REPLACE INTO inode({_INODE}, cut) VALUES (?,?,?,?,?,?,?,?,?,?,?,{CUT})",
                [
                    (
                        i.ino,
                        i.mode,
                        i.uid,
                        i.gid,
                        i.nlink,
                        i.rdev,
                        i.size,
                        i.atime_ns,
                        i.mtime_ns,
                        i.ctime_ns,
                        int(i.file_class),
                    )
                    for i in self._touched.values()
                ],
            )
            self._touched.clear()

    def remove_inode(self, inode: Inode) -> None:
        """Its last name is gone. The live file stays until `grave` says that nobody needs it."""
        self._touched.pop(inode.ino, None)
        inode.transaction = self.database.current
        for table in ("inode", "symlink", "live", "dirty"):
            self._execute(f"DELETE FROM {table} WHERE ino = ?", (inode.ino,))
        inode.xattrs = dict(self._execute("DELETE FROM xattr WHERE ino = ? RETURNING name, value", (inode.ino,)))
        if inode.file_class == FileClass.JOURNAL:
            self.forget_journal(inode.ino)
        if inode.is_file:
            self._execute("INSERT OR IGNORE INTO grave VALUES (?)", (inode.ino,))

    # --- names

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        key = (parent, name)
        found = self._execute("SELECT ino FROM dentry WHERE parent = ? AND name = ?", key).get
        if found is None:
            found = self._execute("SELECT ino FROM private_dentry WHERE parent = ? AND name = ?", key).get
        return found  # type: ignore[no-any-return]

    def add_name(self, parent: Ino, name: bytes, ino: Ino, private: bool) -> None:
        entry = self._next_entry
        self._next_entry += 1
        if private:
            self._execute("INSERT INTO private_dentry VALUES (?, ?, ?, ?)", (entry, parent, name, ino))
        else:
            self._execute(f"INSERT INTO dentry VALUES (?, ?, ?, ?, {CUT})", (entry, parent, name, ino))

    def remove_name(self, parent: Ino, name: bytes) -> None:
        key = (parent, name)
        self._execute("DELETE FROM dentry WHERE parent = ? AND name = ?", key)
        if self.database.connection.changes() == 0:
            self._execute("DELETE FROM private_dentry WHERE parent = ? AND name = ?", key)

    def set_privacy(self, name: Name, private: bool) -> None:
        """Moves a name into the table where it belongs; its id stays."""
        self._execute(f"DELETE FROM {'dentry' if private else 'private_dentry'} WHERE id = ?", (name.id,))
        if self.database.connection.changes():
            if private:
                self._execute("INSERT INTO private_dentry VALUES (?, ?, ?, ?)", name)
            else:
                self._execute(f"INSERT INTO dentry VALUES (?, ?, ?, ?, {CUT})", name)

    def directories_with(self, name: bytes) -> list[Ino]:
        """Those that have an entry of this name. Reads every name."""
        part = "SELECT parent FROM {} WHERE name = ?1"
        rows = self._execute(f"{part.format('dentry')} UNION ALL {part.format('private_dentry')}", (name,))
        return [row[0] for row in rows]

    def is_empty(self, directory: Ino) -> bool:
        found = self._execute(
            "SELECT EXISTS(SELECT 1 FROM dentry WHERE parent = ?1) "
            "OR EXISTS(SELECT 1 FROM private_dentry WHERE parent = ?1)",
            (directory,),
        ).get
        return not found

    def entries(self, directory: Ino, after: int, limit: int) -> list[Name]:
        """Up to `limit` entries with an id above `after`, in the order of ids."""
        part = "SELECT * FROM (SELECT id, name, ino FROM {} WHERE parent = ?1 AND id > ?2 ORDER BY id LIMIT ?3)"
        both = f"{part.format('dentry')} UNION ALL {part.format('private_dentry')} ORDER BY 1 LIMIT ?3"
        rows = self._execute(both, (directory, after, limit))
        return [Name(entry, directory, name, ino) for entry, name, ino in rows]

    def children(self, directory: Ino) -> Iterator[Name]:
        after = 0
        while batch := self.entries(directory, after, 1000):
            yield from batch
            after = batch[-1].id

    def names_of(self, ino: Ino) -> list[Name]:
        part = "SELECT id, parent, name, ino FROM {} WHERE ino = ?1"
        rows = self._execute(f"{part.format('dentry')} UNION ALL {part.format('private_dentry')}", (ino,))
        return [Name(*row) for row in rows]

    def has_private_name(self, ino: Ino) -> bool:
        return bool(self._execute("SELECT EXISTS(SELECT 1 FROM private_dentry WHERE ino = ?)", (ino,)).get)

    def first_name(self, ino: Ino) -> Name | None:
        row = self._execute("SELECT id, parent, name, ino FROM dentry WHERE ino = ? LIMIT 1", (ino,)).fetchone()
        row = (
            row
            or self._execute(
                "SELECT id, parent, name, ino FROM private_dentry WHERE ino = ? LIMIT 1", (ino,)
            ).fetchone()
        )
        return Name(*row) if row else None

    # --- symlinks and xattrs

    def set_symlink(self, ino: Ino, target: bytes) -> None:
        self._execute(f"INSERT INTO symlink VALUES (?, ?, {CUT})", (ino, target))

    def symlink(self, ino: Ino) -> bytes | None:
        return self._execute("SELECT target FROM symlink WHERE ino = ?", (ino,)).get  # type: ignore[no-any-return]

    def xattr(self, ino: Ino, name: bytes) -> bytes | None:
        return self._execute("SELECT value FROM xattr WHERE ino = ? AND name = ?", (ino, name)).get  # type: ignore[no-any-return]

    def xattrs(self, ino: Ino) -> list[bytes]:
        return [row[0] for row in self._execute("SELECT name FROM xattr WHERE ino = ? ORDER BY name", (ino,))]

    def set_xattr(self, ino: Ino, name: bytes, value: bytes) -> None:
        self._execute(f"INSERT OR REPLACE INTO xattr VALUES (?, ?, ?, {CUT})", (ino, name, value))

    def remove_xattr(self, ino: Ino, name: bytes) -> bool:
        self._execute("DELETE FROM xattr WHERE ino = ? AND name = ?", (ino, name))
        return bool(self.database.connection.changes())

    # --- local notes: dirty marks, live files, graves, journals

    def mark_dirty(self, ino: Ino) -> None:
        self._execute("INSERT INTO dirty VALUES (?, 1) ON CONFLICT(ino) DO UPDATE SET counter = counter + 1", (ino,))

    def clear_dirty(self, inodes: Iterable[Ino]) -> None:
        self.database.connection.executemany("DELETE FROM dirty WHERE ino = ?", [(ino,) for ino in inodes])

    def dirty(self) -> list[Ino]:
        return [row[0] for row in self._execute("SELECT ino FROM dirty ORDER BY ino")]

    def note_live(self, ino: Ino, note: LiveNote) -> None:
        self._execute("INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?)", (ino, *note))

    def live_note(self, ino: Ino) -> LiveNote | None:
        row = self._execute("SELECT size, mtime, ctime FROM live WHERE ino = ?", (ino,)).fetchone()
        return LiveNote(*row) if row else None

    def live_notes(self, after: Ino, limit: int) -> list[tuple[Ino, LiveNote]]:
        """Notes of files that are not dirty, in the order of inode numbers."""
        rows = self._execute(
            "SELECT ino, size, mtime, ctime FROM live WHERE ino > ? AND ino NOT IN (SELECT ino FROM dirty) "
            "ORDER BY ino LIMIT ?",
            (after, limit),
        )
        return [(ino, LiveNote(*rest)) for ino, *rest in rows]

    def graves(self) -> list[Ino]:
        return [row[0] for row in self._execute("SELECT ino FROM grave")]

    def close_graves(self, inodes: Iterable[Ino]) -> None:
        self.database.connection.executemany("DELETE FROM grave WHERE ino = ?", [(ino,) for ino in inodes])

    def journal_note(self, ino: Ino) -> JournalNote | None:
        row = self._execute(f"SELECT {_JOURNAL} FROM journal WHERE ino = ?", (ino,)).fetchone()
        return JournalNote(*row) if row else None

    def note_journal(self, ino: Ino, note: JournalNote) -> None:
        self._execute("INSERT OR REPLACE INTO journal VALUES (?,?,?,?,?,?,?,?,?,?,?)", (ino, *note))

    def journals(self) -> list[tuple[Ino, JournalNote]]:
        rows = self._execute(f"SELECT ino, {_JOURNAL} FROM journal ORDER BY ino")
        return [(ino, JournalNote(*rest)) for ino, *rest in rows]

    def segments(self, ino: Ino) -> list[tuple[int, bytes, int]]:
        """(number, digest, lines) of the full segments of a journal that were noted. Those without a row hold zeros."""
        return list(self._execute("SELECT number, digest, lines FROM segment WHERE ino = ? ORDER BY number", (ino,)))

    def note_segments(self, ino: Ino, kept: int, rows: Iterable[tuple[int, bytes, int]]) -> None:
        """Of the rows there were, those below `kept` stay; `rows` are new, or in place of old ones."""
        self._execute("DELETE FROM segment WHERE ino = ? AND number >= ?", (ino, kept))
        many = self.database.connection.executemany
        rows = list(rows)
        zeros = [(ino, number) for number, digest, _ in rows if digest == ZERO_SEGMENT_DIGEST and number < kept]
        many("DELETE FROM segment WHERE ino = ? AND number = ?", zeros)
        many(
            "INSERT OR REPLACE INTO segment VALUES (?, ?, ?, ?)",
            [(ino, number, digest, lines) for number, digest, lines in rows if digest != ZERO_SEGMENT_DIGEST],
        )

    def forget_journal(self, ino: Ino) -> None:
        """The inode is no journal any more."""
        self._execute("DELETE FROM journal WHERE ino = ?", (ino,))
        self._execute("DELETE FROM segment WHERE ino = ?", (ino,))

    def set_gone(self, counts: JournalCounts) -> None:
        """The counts of all journals that are no more."""
        self.set_meta("gone", json.dumps(dataclasses.astuple(counts)))

    def gone(self) -> JournalCounts:
        return JournalCounts(*json.loads(self.meta("gone") or "[]"))  # type: ignore[arg-type]


def _inode(row: tuple[int, ...]) -> Inode:
    ino, mode, uid, gid, nlink, rdev, size, atime, mtime, ctime, file_class = row
    return Inode(Ino(ino), mode, uid, gid, nlink, rdev, size, atime, mtime, ctime, FileClass(file_class))
