"""The SQLite file of a state folder: transactions, and when they are durable.

The fs process is its only writer, through one connection on the loop. Operations are savepoints in an open
transaction, which is committed after 64 operations, 10 ms, or an fsync. `synchronous=NORMAL`, so a COMMIT is a write
to the page cache: it survives our death. `durable()` syncs the write-ahead log through a descriptor of its own, in a
thread, once for everybody who waits; it alone makes a COMMIT survive a power cut.

Transactions are numbered within a mount: `current` is the open one (or the next), `committed` and `synced` say how
far the others got.

Space in the write-ahead log is allocated before an operation is accepted, so that a COMMIT of acknowledged operations
does not meet a full disk. A failed COMMIT or sync is final: `failure` is set, and nothing is written any more.
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator

import apsw
import trio

from deltapool.fs.config import Limits
from deltapool.fs.errors import NoSpace, ReadOnly, StateError

log = logging.getLogger(__name__)

FORMAT = 1  # PRAGMA user_version; docs/format.md has its history
INDEX_BYTES = 1 << 20  # 32 KiB for each 16 MiB of log
APPLICATION_ID = 0x64706F6F  # "dpoo"

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE inode(ino INTEGER PRIMARY KEY, mode INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
  nlink INTEGER NOT NULL, rdev INTEGER NOT NULL, size INTEGER NOT NULL, atime INTEGER NOT NULL, mtime INTEGER NOT NULL,
  ctime INTEGER NOT NULL, class INTEGER NOT NULL, cut INTEGER NOT NULL);
CREATE TABLE dentry(id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER NOT NULL, cut
INTEGER NOT NULL); CREATE UNIQUE INDEX dentry_name ON dentry(parent, name);
CREATE INDEX dentry_order ON dentry(parent, id);
CREATE INDEX dentry_ino ON dentry(ino);
CREATE TABLE symlink(ino INTEGER PRIMARY KEY, target BLOB NOT NULL, cut INTEGER NOT NULL);
CREATE TABLE xattr(ino INTEGER, name BLOB, value BLOB NOT NULL, cut INTEGER NOT NULL, PRIMARY KEY(ino, name)) WITHOUT
ROWID; CREATE TABLE private_dentry(id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER
NOT NULL); CREATE UNIQUE INDEX private_dentry_name ON private_dentry(parent, name);
CREATE INDEX private_dentry_order ON private_dentry(parent, id);
CREATE INDEX private_dentry_ino ON private_dentry(ino);
CREATE TABLE live(ino INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime INTEGER NOT NULL, ctime INTEGER NOT NULL);
CREATE TABLE dirty(ino INTEGER PRIMARY KEY, counter INTEGER NOT NULL);
CREATE TABLE grave(ino INTEGER PRIMARY KEY);
CREATE TABLE journal(ino INTEGER PRIMARY KEY, length INTEGER NOT NULL, digest BLOB NOT NULL, lines INTEGER NOT NULL,
nuls INTEGER NOT NULL, durable INTEGER NOT NULL,
  appended INTEGER NOT NULL, written INTEGER NOT NULL, changed INTEGER NOT NULL, read INTEGER NOT NULL, folded INTEGER
  NOT NULL);
CREATE TABLE segment(ino INTEGER, number INTEGER, digest BLOB NOT NULL, lines INTEGER NOT NULL, PRIMARY KEY(ino,
number)) WITHOUT ROWID;
"""


def open_connection(path: pathlib.Path, *, read_only: bool = False) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = apsw.Connection(str(path), flags=flags, statementcachesize=200)
    connection.set_busy_timeout(5000)
    return connection


def check_format(connection: apsw.Connection, path: pathlib.Path) -> int:
    """The format of an existing database, 0 for an empty one; raises StateError for a foreign or a newer one."""
    try:
        version = int(connection.pragma("user_version"))
        application = int(connection.pragma("application_id"))
    except apsw.Error as error:
        raise StateError(f"{path} is not a namespace of deltapool: {error}") from None
    if version == 0 and application == 0:
        return 0
    if application != APPLICATION_ID:
        raise StateError(f"{path} belongs to another program (application id {application:#x})")
    if version > FORMAT:
        raise StateError(f"{path} has format {version}, of a newer deltapool; this one reads up to {FORMAT}: upgrade")
    return version


class Database:
    """The writer's connection. All methods belong to the loop's thread, except where one says otherwise."""

    def __init__(self, path: pathlib.Path, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.failure: str | None = None
        self.current = 1
        self.committed = 0
        self.synced = 0
        self.wal_bytes_written = 0
        self.before_commit: Callable[[], None] = lambda: None
        self.wake = trio.Event()  # set when a transaction has been opened
        self.in_operation = False
        self._operations = 0
        self._sync_lock = trio.Lock()
        self._checkpointing = False
        self._wal_end = 0
        self._allocated = 0
        self.connection = open_connection(path)
        if check_format(self.connection, path) == 0:
            self.connection.pragma("page_size", 4096)
            self.connection.pragma("journal_mode", "WAL")
            with self.connection:
                self.connection.execute(SCHEMA)
                self.connection.pragma("application_id", APPLICATION_ID)
                self.connection.pragma("user_version", FORMAT)
        if self.connection.pragma("journal_mode", "WAL") != "wal":
            raise StateError(
                f"{path}: the folder's filesystem cannot hold a write-ahead log; choose another with --state"
            )
        for name, value in (
            ("synchronous", "NORMAL"),
            ("cache_size", -32 << 10),
            ("cache_spill", 0),
            ("temp_store", 2),
            ("foreign_keys", 0),
        ):
            self.connection.pragma(name, value)
        self.connection.set_wal_hook(self._committed_frames)
        self.connection.execute("BEGIN IMMEDIATE; COMMIT")  # makes the -wal file appear
        self._wal = os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._index = self._grow_index()
        self._execute = self.connection.execute

    def _grow_index(self) -> int:
        """Has the log's index, `-shm`, as large as it may ever become: it grows inside a COMMIT, and on a full disk the
        COMMIT would fail. Keeps it open, since closing it would take SQLite's own locks on it away."""
        index = os.open(f"{self.path}-shm", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # full already: then the log does not grow either
            os.posix_fallocate(index, 0, INDEX_BYTES)
        return index

    # --- operations

    def check_writable(self, *, frees: bool = False) -> None:
        """Raises unless an operation may begin; `frees` is true for one that makes room."""
        if self.failure is not None:
            raise ReadOnly(self.failure)
        if self._allocated - self._wal_end < self.limits.wal_reserve_bytes:
            self._reserve(self.limits.wal_reserve_least_bytes if frees else self.limits.wal_reserve_bytes)

    def has_room(self, *, frees: bool = False) -> bool:
        """Whether an operation may begin now. Raises ReadOnly if none may ever again."""
        try:
            self.check_writable(frees=frees)
        except NoSpace:
            return False
        return True

    def _reserve(self, least: int) -> None:
        for wanted in (2 * self.limits.wal_reserve_bytes, least):
            try:
                os.posix_fallocate(self._wal, 0, self._wal_end + wanted)
                self._allocated = max(self._allocated, self._wal_end + wanted)
                return
            except OSError as error:
                reason = str(error)
        if self._allocated - self._wal_end < least:
            raise NoSpace(f"no room for the namespace's log: {reason}")

    @contextlib.contextmanager
    def operation(self, *, frees: bool = False) -> Iterator[int]:
        """One operation on the namespace: all of its statements or none. Yields the number of its transaction."""
        self.check_writable(frees=frees)
        self.begin()
        self._execute("SAVEPOINT operation")
        self.in_operation = True
        try:
            yield self.current
        except BaseException:
            self._execute("ROLLBACK TO operation")
            self._execute("RELEASE operation")
            raise
        finally:
            self.in_operation = False
        self._execute("RELEASE operation")
        self._operations += 1
        if self._operations >= self.limits.commit_operations:
            self.commit()

    def begin(self) -> None:
        """Opens the transaction if there is none."""
        if not self.connection.in_transaction:
            self._execute("BEGIN IMMEDIATE")
            self.wake.set()

    @property
    def is_open(self) -> bool:
        return self.connection.in_transaction

    def commit(self) -> None:
        """Commits the open transaction: it now survives the end of this process. Raises ReadOnly if that fails."""
        if self.failure is not None:
            raise ReadOnly(self.failure)
        if not self.connection.in_transaction:
            return
        try:
            self.before_commit()
            self._execute("COMMIT")
        except (apsw.Error, OSError) as error:
            self.fail(f"a COMMIT of the namespace failed: {error}")
            raise ReadOnly(self.failure) from error
        self.committed = self.current
        self.current += 1
        self._operations = 0

    def fail(self, reason: str) -> None:
        """No more writes: what is durable is unknown from here on. The first reason stays."""
        if self.failure is None:
            log.error("the mount is read-only from now on: %s", reason)
            self.failure = reason

    # --- durability

    async def durable(self, transaction: int) -> None:
        """Returns when `transaction` and all before it survive a power cut."""
        if self.synced >= transaction:
            return
        if self.committed < transaction:
            self.commit()
        async with self._sync_lock:
            if self.synced >= transaction:
                return
            if self.failure is not None:
                raise ReadOnly(self.failure)
            target = self.committed
            try:
                await trio.to_thread.run_sync(os.fdatasync, self._wal)
            except OSError as error:
                self.fail(f"the namespace's log could not be made durable: {error}")
                raise ReadOnly(self.failure) from error
            self.synced = max(self.synced, target)

    def sync_now(self) -> None:
        """What is committed survives a power cut. Waits for the disk, and so does everybody else: for what must be
        durable in the middle of a step of the loop. Raises OSError."""
        os.fdatasync(self._wal)
        self.synced = self.committed

    def _committed_frames(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        end = 32 + pages * (4096 + 24)
        self.wal_bytes_written += end - self._wal_end if end > self._wal_end else end
        self._wal_end = end
        return apsw.SQLITE_OK

    @property
    def wants_checkpoint(self) -> bool:
        return self._wal_end > self.limits.wal_checkpoint_bytes and not self._checkpointing and self.failure is None

    async def checkpoint(self) -> None:
        """Moves the log into the database, in a thread with a connection of its own. A full disk or a reader only
        postpones it."""
        self._checkpointing = True
        try:
            await trio.to_thread.run_sync(_checkpoint, self.path)
        except (apsw.FullError, apsw.BusyError, apsw.LockedError):
            pass  # the log stays, and with it every transaction: another try comes with the next commit
        except apsw.Error as error:
            self.fail(f"the namespace could not be checkpointed: {error}")
        finally:
            self._checkpointing = False

    def close(self) -> None:
        """After a commit and a sync: folds the log into the database file and closes it."""
        if self.failure is None:
            self.commit()
            with contextlib.suppress(apsw.Error):
                self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        elif self.connection.in_transaction:
            self._execute("ROLLBACK")
        os.close(self._wal)
        self.connection.close()
        os.close(self._index)


def _checkpoint(path: pathlib.Path) -> None:
    connection = open_connection(path)
    try:
        connection.pragma("synchronous", "NORMAL")
        connection.pragma("wal_autocheckpoint", 0)
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    finally:
        connection.close()
