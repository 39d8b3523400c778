"""Comparing a state folder with itself: the tree, the local notes, and the live files. Changes nothing.

The comparison is made against one snapshot of the namespace. Of a folder that nobody holds, the database is copied
aside first: to read one with a write-ahead log, SQLite writes beside it. On a folder that is mounted, work goes on: the
mount is asked to flush, what is said of an inode that changed during the comparison is dropped, and only what a second
pass finds again is reported. Dirty files are not compared.

What a crash leaves and the next mount puts in order is counted as in flight, not found as damage.

Kinds of finding:

`namespace` SQLite's file is damaged · `root` · `dangling` a name without an inode · `parent` a name in no directory ·
`name` malformed, or there twice · `links` nlink is not what the names say · `unreachable` from the root · `number`
never handed out · `type` of inode or class unknown · `private` a name in the wrong table · `symlink` · `xattr` ·
`note` something local is noted of the wrong inode, or lacking · `missing` live file · `changed` behind our back ·
`size` · `journal` its bytes are not those noted · `orphan` a live file without an inode · `undeclared` a file that
docs/format.md does not know
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import apsw

from deltapool.cas.digest import SEGMENT_BYTES, ZERO_SEGMENT_DIGEST, journal_digest, segment_digest
from deltapool.fs import control, state
from deltapool.fs.classes import FileClass
from deltapool.fs.consistency import breaches, damages, path_of
from deltapool.fs.database import check_format, open_connection
from deltapool.fs.errors import UserError
from deltapool.fs.inode import ROOT, Ino
from deltapool.fs.livefile import relative_path
from deltapool.fs.recover import BOOT_ID
from deltapool.fs.state import LIVE_DIRECTORIES, LIVE_FOLDER

ANSWER_SECONDS = 60.0
FLUSH_SECONDS = 600.0
POLL_SECONDS = 0.1
TRIES = 5

# Everything that a state folder may hold. docs/format.md says what each of them is; a test compares.
FILES = {
    "state.json": "file",
    "state.json.new": "file",
    "lock": "file",
    "namespace.db": "file",
    "namespace.db-wal": "file",
    "namespace.db-shm": "file",
    "namespace.db-journal": "file",
    "live": "folder",
    "live/<hh>": "folder",
    "live/<hh>/<ino>": "file",
    "live/<hh>/<ino>.new": "file",
    "lost": "folder",
    "lost/<ino>": "file",
    "lost/<ino>.new": "file",
    "control.sock": "socket",
    "log": "folder",
    "log/deltapool.log": "file",
    "log/deltapool.log.<n>": "file",
}
TOKENS = {"<hh>": "[0-9a-f]{2}", "<ino>": "[1-9][0-9]{0,18}", "<n>": "[1-9][0-9]*"}
_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFSOCK: "socket"}

# What must be the same after a comparison as before it for its result to say something.
_FACTS = """SELECT
  (SELECT mode || ',' || size || ',' || class FROM inode WHERE ino = ?1),
  (SELECT counter FROM dirty WHERE ino = ?1),
  (SELECT size || ',' || mtime || ',' || ctime FROM live WHERE ino = ?1),
  (SELECT hex(digest) || ',' || length FROM journal WHERE ino = ?1),
  (SELECT 1 FROM grave WHERE ino = ?1)"""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. `inode` is 0 where none is meant; `path` is the best that is known (os.fsdecode)."""

    kind: str
    inode: int
    path: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {f'inode {self.inode}, ' if self.inode else ''}{self.path}: {self.message}"


@dataclasses.dataclass(slots=True)
class Result:
    inodes: int = 0
    bytes: int = 0  # of live files
    findings: list[Finding] = dataclasses.field(default_factory=list)
    in_flight: dict[str, int] = dataclasses.field(default_factory=dict)  # what a mount, this or the next, deals with


def check(folder: pathlib.Path) -> Result:
    """Compares everything in a state folder. Raises UserError if it is none, or cannot be read."""
    try:
        state.read_volume(folder)
        for _ in range(TRIES):
            if state.holder(folder) is not None:
                result = _check_mounted(folder)
                if result is not None:
                    return result
                continue
            before = _fingerprint(folder)
            result = _compare(folder, mounted=False, audited=False)
            if state.holder(folder) is None and _fingerprint(folder) == before:
                return result
    except OSError as error:
        raise UserError(f"{folder} could not be read: {error}") from None
    raise UserError(f"{folder} is mounted and unmounted again and again: it could not be compared in peace")


def _fingerprint(folder: pathlib.Path) -> list[tuple[int, int, int] | None]:
    """Another one after somebody has written the namespace."""
    found: list[tuple[int, int, int] | None] = []
    for name in (state.NAMESPACE_FILE, f"{state.NAMESPACE_FILE}-wal"):
        try:
            status = os.stat(folder / name)
            found.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except FileNotFoundError:
            found.append(None)
    return found


def _check_mounted(folder: pathlib.Path) -> Result | None:
    """What two passes both find. None if the folder was let go meanwhile."""
    audited = _flush(folder)
    if audited is None:
        return None
    first = _compare(folder, mounted=True, audited=audited)
    if not first.findings:
        return first
    audited = _flush(folder)
    if audited is None:
        return None
    second = _compare(folder, mounted=True, audited=audited)
    known = {_what(finding) for finding in first.findings}
    second.findings = [finding for finding in second.findings if _what(finding) in known]
    return second


def _what(finding: Finding) -> tuple[str, int | str]:
    return finding.kind, finding.inode or finding.path


def _flush(folder: pathlib.Path) -> bool | None:
    """Asks the mount to make everything clean. Whether its audit has ended; None if nobody holds the folder now."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            status = control.call(folder, "status", ANSWER_SECONDS)
            if status["read_only"] is None:
                control.call(folder, "flush", FLUSH_SECONDS)
            return bool(status["audit"]["done"])
        except UserError:
            if state.holder(folder) is None:
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)  # it is just being mounted or unmounted: it will answer, or let go


def _compare(folder: pathlib.Path, *, mounted: bool, audited: bool) -> Result:
    """One comparison. `audited`: a running mount has set aside what the one before it left."""
    comparison = _Comparison(folder, mounted=mounted, audited=audited)
    with contextlib.ExitStack() as stack:
        here = folder if mounted else stack.enter_context(_copy(folder))
        try:
            if not (here / state.NAMESPACE_FILE).exists():
                comparison.look_around()
                return comparison.result
            connection = open_connection(here / state.NAMESPACE_FILE, read_only=mounted)
            stack.callback(connection.close)
            comparison.run(connection)
        except apsw.Error as error:
            comparison.found("namespace", 0, f"SQLite says: {error}", state.NAMESPACE_FILE)
    return comparison.result


@contextlib.contextmanager
def _copy(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder with a copy of the namespace as its last writer left it."""
    with tempfile.TemporaryDirectory(prefix="deltapool-fsck-") as copy:
        for name in (state.NAMESPACE_FILE, f"{state.NAMESPACE_FILE}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(folder / name, pathlib.Path(copy) / name)
        yield pathlib.Path(copy)


class _Comparison:
    """One snapshot of the namespace against the folder."""

    def __init__(self, folder: pathlib.Path, *, mounted: bool, audited: bool) -> None:
        self.folder = folder
        self.mounted = mounted
        self.audited = audited
        self.recovered = mounted  # there is nothing left to do for a mount that begins
        self.marked = audited  # no power cut has taken dirty marks: all that may differ from its note is marked
        self.result = Result()
        self._connection: apsw.Connection | None = None
        self._shaky: list[
            tuple[Finding, int, Any]
        ] = []  # findings that hold only if these facts about an inode still do

    def found(self, kind: str, inode: int, message: str, path: str) -> Finding:
        finding = Finding(kind, inode, path, message)
        self.result.findings.append(finding)
        return finding

    def left(self, kind: str) -> None:
        self.result.in_flight[kind] = self.result.in_flight.get(kind, 0) + 1

    def run(self, connection: apsw.Connection) -> None:
        connection.pragma("temp_store", 2)
        connection.pragma("user_version")  # raises what apsw says of a file that is no database
        if check_format(connection, self.folder / state.NAMESPACE_FILE) == 0:
            self.look_around()
            return
        for damage in damages(connection):
            self.found("namespace", 0, f"SQLite says: {damage}", state.NAMESPACE_FILE)
        if self.result.findings:
            return  # what else might be found would follow from it
        self._connection, self._execute = connection, connection.execute
        self._execute("BEGIN")
        meta = dict(self._execute("SELECT key, value FROM meta"))
        clean = meta.get("clean") == 1
        self.recovered = self.mounted or clean
        self.audited = self.audited or (clean and not self.mounted)
        self.marked = self.audited or (not self.mounted and meta.get("boot") == BOOT_ID.read_text().strip())
        self.result.inodes = self._execute("SELECT count(*) FROM inode").get
        for breach in breaches(connection):
            path = path_of(connection, breach.inode, breach.parent, breach.name)
            self.found(breach.kind, breach.inode, breach.message, _shown(path, breach.inode))
        self._live_files()
        self.look_around()
        for _ in self._execute("SELECT 1 FROM grave"):
            self.left("grave")
        self._execute("COMMIT")
        for finding, ino, facts in self._shaky:
            if self._execute(_FACTS, (ino,)).fetchone() != facts:
                self.result.findings.remove(finding)

    def _differs(self, kind: str, ino: int, message: str) -> None:
        """A finding about a live file, which may be overtaken."""
        assert self._connection is not None
        finding = self.found(kind, ino, message, _shown(path_of(self._connection, ino), ino))
        self._shaky.append((finding, ino, self._execute(_FACTS, (ino,)).fetchone()))

    # --- inodes and their live files

    def _live_files(self) -> None:
        rows = self._execute(
            """SELECT i.ino, i.size, i.class, d.ino IS NOT NULL, l.size, l.mtime, l.ctime FROM inode i
            LEFT JOIN dirty d ON d.ino = i.ino LEFT JOIN live l ON l.ino = i.ino
            WHERE i.mode & 61440 = 32768 ORDER BY i.ino"""
        )
        for ino, size, file_class, dirty, *note in rows:
            path = self.folder / LIVE_FOLDER / relative_path(Ino(ino))
            if dirty:
                self.left("dirty")
            try:
                live = os.lstat(path)
            except FileNotFoundError:
                if self.recovered or not dirty:
                    self._differs("missing", ino, f"its live file {path} is missing")
                continue
            self.result.bytes += live.st_size
            if dirty:
                continue
            present = (live.st_size, live.st_mtime_ns, live.st_ctime_ns)
            if None in note:
                self._differs("note", ino, f"it is not dirty, but nothing is noted of its live file {path}")
            elif present != tuple(note) and not self.marked:
                self.left("unmarked")
            elif present != tuple(note):
                what = "size, mtime and ctime are {}, {} and {}".format(*present)
                self._differs("changed", ino, f"its live file {path} was changed: {what}, noted are {tuple(note)}")
            elif size != live.st_size:
                self._differs("size", ino, f"its size is {size}, that of its live file {path} {live.st_size}")
            elif file_class == FileClass.JOURNAL and stat.S_ISREG(live.st_mode):
                self._journal(ino, path, size)

    def _journal(self, ino: int, path: pathlib.Path, size: int) -> None:
        """The bytes of a clean journal against its note and those of its segments."""
        query = "SELECT length, digest, lines, nuls, durable FROM journal WHERE ino = ?"
        note = self._execute(query, (ino,)).fetchone()
        if note is None:
            self._differs("note", ino, "a journal that is not dirty, but nothing is noted of it")
            return
        length, digest, lines, nuls, durable = note
        if length != size or durable > size:
            what = f"{length} bytes are noted, {durable} of them as durable"
            self._differs("journal", ino, f"{what}, but its live file {path} has {size}")
            return
        digests, counts, has_nuls = _digested(path)
        if journal_digest(digests) != digest:
            self._differs(
                "journal", ino, f"its live file {path} does not have the digest that is noted, {digest.hex()}"
            )
        elif sum(counts) != lines:
            self._differs("journal", ino, f"its live file {path} has {sum(counts)} lines, noted are {lines}")
        if has_nuls and not nuls:
            self._differs("journal", ino, f"its live file {path} holds NULs, but none are noted: recovery would cut it")
        whole = list(zip(digests, counts, strict=True))[: size // SEGMENT_BYTES]
        zeros = (ZERO_SEGMENT_DIGEST, 0)
        segments = dict(enumerate(whole))
        for number, *segment in self._execute("SELECT number, digest, lines FROM segment WHERE ino = ?", (ino,)):
            if segments.pop(number, None) != tuple(segment):
                self._differs("journal", ino, f"segment {number} of its live file {path} is not the one that is noted")
        for number, found in segments.items():
            if found != zeros:
                self._differs("journal", ino, f"segment {number} of its live file {path} is noted as zeros")

    # --- what lies in the folder

    def look_around(self) -> None:
        """Every file of the folder must be declared, and every live file belong to an inode."""
        pending = [""]
        while pending:
            below = pending.pop()
            for entry in os.scandir(self.folder / below):
                path = f"{below}/{entry.name}" if below else entry.name
                try:
                    kind = _TYPES.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
                except FileNotFoundError:
                    continue  # removed meanwhile
                declared = next((name for name, pattern in _PATTERNS.items() if pattern.fullmatch(path)), None)
                if declared is None or FILES[declared] != kind:
                    self.found("undeclared", 0, f"a state folder holds no {kind or 'file'} of this name", path)
                elif kind == "folder":
                    pending.append(path)
                elif declared.startswith(f"{LIVE_FOLDER}/"):
                    self._live_file(path, entry.name)

    def _live_file(self, path: str, name: str) -> None:
        stem, _, suffix = name.partition(".")
        ino = Ino(int(stem))
        if path.split("/")[1] != f"{ino % LIVE_DIRECTORIES:02x}":
            self.found("undeclared", ino, "a live file in the wrong folder: nobody reads it here", path)
            return
        row = None
        if self._connection is not None:
            row = self._execute(
                """SELECT (SELECT mode & 61440 = 32768 FROM inode WHERE ino = ?1), (SELECT 1 FROM dirty WHERE ino = ?1),
                (SELECT 1 FROM grave WHERE ino = ?1)""",
                (ino,),
            ).fetchone()
        known, dirty, grave = row or (None, None, None)
        if grave or (known and not suffix):
            return
        if suffix and known and (dirty or not self.recovered):
            self.left("new")
        elif not self.audited and self._connection is not None:
            self.left("orphan")
        elif suffix and known:
            self._orphan(ino, path, "the rewrite of a file that is not being rewritten")
        else:
            self._orphan(ino, path, "a live file without an inode")

    def _orphan(self, ino: Ino, path: str, message: str) -> None:
        finding = self.found("orphan", ino, message, path)
        if self._connection is not None:
            self._shaky.append((finding, ino, self._execute(_FACTS, (ino,)).fetchone()))


def _patterns() -> dict[str, re.Pattern[str]]:
    found = {}
    for name in FILES:
        pattern = re.escape(name)
        for token, meaning in TOKENS.items():
            pattern = pattern.replace(re.escape(token), meaning)
        found[name] = re.compile(pattern)
    return found


_PATTERNS = _patterns()


def _digested(path: pathlib.Path) -> tuple[list[bytes], list[int], bool]:
    """Digests and line counts of the segments of a journal, and whether there is a NUL in it. Holes are not read."""
    digests: list[bytes] = []
    counts: list[int] = []
    has_nuls = False
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data_at = 0
        for offset in range(0, size, SEGMENT_BYTES):
            if data_at <= offset:
                data_at = _next_data(file.fileno(), offset, size)
            if data_at >= offset + SEGMENT_BYTES and offset + SEGMENT_BYTES <= size:
                digests.append(ZERO_SEGMENT_DIGEST)
                counts.append(0)
                has_nuls = True
                continue
            segment = _read(file.fileno(), offset)
            digests.append(segment_digest(segment))
            counts.append(segment.count(b"\n"))
            has_nuls = has_nuls or b"\0" in segment
    return digests, counts, has_nuls


def _next_data(fd: int, offset: int, size: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size  # a hole up to the end


def _read(fd: int, offset: int) -> bytes:
    """A whole segment, or what there is of it."""
    data = b""
    while len(data) < SEGMENT_BYTES and (more := os.pread(fd, SEGMENT_BYTES - len(data), offset + len(data))):
        data += more
    return data


def _shown(path: bytes, ino: int) -> str:
    if path:
        return os.fsdecode(path)
    return "." if ino == ROOT else f"{LIVE_FOLDER}/{relative_path(Ino(ino))}"
