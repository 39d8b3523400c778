"""The background work on live files: noting journals, settling work, freeing what was removed.

*Noting*, about once a second: every journal that changed is made durable and digested, all of them as of one instant.
*Settling*: a dirty file is made durable, what its live file looks like is noted, and its dirty mark is cleared; a
rewritten file takes the place of the old one. Recovery then need not look at it. *Reaping*: live files of removed
inodes go once the removal is durable.

Facts are fixed in one step of the loop, disks are waited for in threads, and what was found is taken over only if the
inode has not changed in between. A failed sync poisons the mount.
"""

import os
from collections.abc import Callable

import trio

from deltapool.cas.digest import Read
from deltapool.fs.classes import FileClass
from deltapool.fs.errors import FilesystemError
from deltapool.fs.files import Files
from deltapool.fs.inode import Ino, Inode
from deltapool.fs.journal import Findings, Instant, Journal, examine
from deltapool.fs.names import Names
from deltapool.fs.namespace import LiveNote

PATIENCE = 5  # passes after which a rewritten file that is still being written takes the place of the old one

Sink = Callable[[Inode, Journal, Instant, Findings, Read], None]
"""Told of every note of a journal before it is taken over, in a thread. Tests record deltas with it."""


class Settler:
    def __init__(self, names: Names, files: Files, sink: Sink | None = None) -> None:
        self.names = names
        self.files = files
        self.inodes = files.inodes
        self.store = files.store
        self.database = files.database
        self.namespace = files.inodes.namespace
        self.limits = files.limits
        self.clock = files.clock
        self.sink = sink
        self.hurry = trio.Event()
        self.settle_lock = trio.Lock()
        self.note_lock = trio.Lock()
        self._passes: dict[Ino, int] = {}
        files.hurry = lambda: self.hurry.set()

    # --- journals

    async def note(self, *, everything: bool = False) -> None:
        """Notes every journal that changed; `everything` ends hold-backs too."""
        async with self.note_lock:
            due: list[tuple[Inode, Journal, Instant]] = []
            now = self.clock.steady()
            for inode in list(self.inodes.dirty.values()):
                if inode.file_class != FileClass.JOURNAL:
                    continue
                journal = self.files.journal(inode)
                if journal.held and (everything or now - inode.changed_at >= self.limits.hold_back_seconds):
                    self.files.end_hold(inode)
                if journal.wants_note:
                    due.append((inode, journal, journal.begin_note(inode.mtime_ns)))
            if due:
                await self._note(due)

    async def _note(self, due: list[tuple[Inode, Journal, Instant]]) -> None:
        found: dict[Ino, Findings | None] = {}

        async def look(inode: Inode, journal: Journal, instant: Instant) -> None:
            path = self.store.path(inode.ino)
            found[inode.ino] = await trio.to_thread.run_sync(self._examine, path, inode, journal, instant)

        try:
            async with trio.open_nursery() as nursery:
                for inode, journal, instant in due:
                    nursery.start_soon(look, inode, journal, instant)
        except* OSError as errors:
            self.database.fail(f"a journal could not be made durable: {errors.exceptions[0]}")
        if self.database.failure is not None:
            return
        self.database.begin()
        for inode, journal, instant in due:
            findings = found[inode.ino]
            note = journal.end_note(findings)
            if instant.ancestor is not None and note is not None:
                self.store.needed.discard(instant.ancestor.ino)
            if note is None or findings is None or inode.nlink == 0 or inode.journal is not journal:
                continue
            self.namespace.note_journal(inode.ino, note)
            whole = range(instant.length >> 20)
            fresh = [(i, findings.digests[i], findings.lines[i]) for i in whole if instant.known[i] is None]
            self.namespace.note_segments(inode.ino, fresh, len(whole))
        self.database.commit()

    def _examine(self, path: str, inode: Inode, journal: Journal, instant: Instant) -> Findings | None:
        """In a thread. None if the file was removed or truncated meanwhile."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            os.fdatasync(fd)
            ancestor = None
            if instant.ancestor is not None:
                try:
                    ancestor = os.open(self.store.path(instant.ancestor.ino), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    ancestor = None
            try:
                read = reader(fd)
                findings = examine(instant, read, reader(ancestor) if ancestor is not None else None)
                if self.sink is not None:
                    self.sink(inode, journal, instant, findings, read)
                return findings
            except EOFError:
                return None
            finally:
                if ancestor is not None:
                    os.close(ancestor)
        finally:
            os.close(fd)

    # --- settling

    async def settle(self, *, everything: bool = False) -> None:
        """Makes dirty files clean: durable, noted, without a mark. `everything` takes in those still being written."""
        async with self.settle_lock:
            self.hurry = trio.Event()
            batch = [inode for inode in list(self.inodes.dirty.values()) if self._ripe(inode, everything)]
            if not batch or self.database.failure is not None:
                return
            for inode in batch:
                self.files.store_times(inode)
            seen = [(inode, inode.changes) for inode in batch]
            try:
                await trio.to_thread.run_sync(
                    self._sync, [(inode.ino, inode.ino in self.store.rewriting) for inode in batch]
                )
                for inode, changes in seen:
                    inode.synced = max(inode.synced, changes)
                await self._replace_old(seen)
                self._take_over(seen)
            except OSError as error:
                self.database.fail(f"live files could not be made durable: {error}")
            except FilesystemError:
                return  # no room in the namespace, or poisoned: they stay dirty

    def _ripe(self, inode: Inode, everything: bool) -> bool:
        if everything:
            return inode.file_class != FileClass.JOURNAL or not self.files.journal(inode).wants_note
        idle = self.clock.steady() - inode.changed_at
        if inode.file_class == FileClass.JOURNAL:
            journal = self.files.journal(inode)
            return idle >= self.limits.journal_idle_seconds and not (
                journal.wants_note or journal.held or journal.is_being_noted
            )
        if inode.writers and idle < self.limits.settle_seconds and inode.ino in self.store.rewriting:
            passes = self._passes[inode.ino] = self._passes.get(inode.ino, 0) + 1
            return passes > PATIENCE
        return True

    def _sync(self, files: list[tuple[Ino, bool]]) -> None:
        """In a thread: bytes and times of these live files are durable afterwards."""
        if len(files) > self.limits.sync_each_files:
            self.store.sync_all()
            return
        for ino, new in files:
            try:
                fd = os.open(self.store.path(ino, new=new), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # removed, or promoted by an fsync
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    async def _replace_old(self, seen: list[tuple[Inode, int]]) -> None:
        """Rewritten files take the place of the old ones; names of live files become durable."""
        for inode, changes in seen:
            if (
                inode.ino in self.store.rewriting
                and inode.nlink
                and (inode.changes == changes or self._passes.get(inode.ino, 0) > PATIENCE)
            ):
                self.files.promote(inode)
                self._passes.pop(inode.ino, None)
        fresh = {inode.ino for inode, _ in seen} & self.store.fresh
        for folder in {ino % 256: ino for ino in fresh}.values():
            await trio.to_thread.run_sync(self.store.sync_folder, folder)
        self.store.fresh -= fresh - self.store.rewriting

    def _take_over(self, seen: list[tuple[Inode, int]]) -> None:
        still = [
            i
            for i, changes in seen
            if i.changes == changes and i.nlink and i.ino not in self.store.rewriting and i.ino not in self.store.fresh
        ]
        self.database.check_writable()
        self.database.begin()
        done: list[Ino] = []
        for inode in still:
            try:
                found = self.store.stat(inode.ino)
            except FileNotFoundError:
                continue  # somebody removed it from outside: it stays dirty, and fsck says so
            done.append(inode.ino)
            self.namespace.note_live(inode.ino, LiveNote(found.st_size, found.st_mtime_ns, found.st_ctime_ns))
            self.namespace.touch(inode)
            inode.marked = False
            self.inodes.dirty.pop(inode.ino, None)
            if inode.file_class == FileClass.JOURNAL and not inode.handles:
                self.namespace.note_journal(inode.ino, self.files.journal(inode).note)
                inode.journal = None
        self.namespace.clear_dirty(done)
        self.database.commit()

    async def flush(self) -> None:
        """One pass over everything, also what is being written now."""
        await self.note(everything=True)
        await self.settle(everything=True)
        await self.reap()

    # --- reaping

    async def reap(self) -> None:
        """Frees the bytes of removed inodes that nobody has open, once their removal is durable."""
        ripe = [ino for ino in self.names.dead if ino not in self.inodes and ino not in self.store.needed]
        if not ripe or self.database.failure is not None:
            return
        await self.database.durable(max(self.names.dead[ino] for ino in ripe))
        await trio.to_thread.run_sync(self._remove, ripe)
        for ino in ripe:
            del self.names.dead[ino]
            self.store.rewriting.discard(ino)
            self.store.fresh.discard(ino)
        self.database.begin()
        self.namespace.close_graves(ripe)
        self.database.commit()

    def _remove(self, inodes: list[Ino]) -> None:
        for ino in inodes:
            self.store.remove(ino)


def reader(fd: int) -> Read:
    """Exactly as many bytes as asked for, or EOFError."""

    def read(offset: int, size: int) -> bytes:
        data = os.pread(fd, size, offset)
        if len(data) != size:
            raise EOFError(f"{len(data)} of {size} bytes at {offset}")
        return data

    return read
