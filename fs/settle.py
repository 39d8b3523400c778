"""The background work on live files: noting journals, settling work, freeing what was removed.

*Noting*, about once a second: every journal that changed is made durable and digested, all of them as of one instant.
*Settling*: a dirty file is made durable, what its live file looks like is noted, and its dirty mark is cleared; a
rewritten file takes the place of the old one. Recovery then need not look at it. *Reaping*: live files of removed
inodes go once the removal is durable.

Facts are fixed in one step of the loop, disks are waited for in threads, and what was found is taken over only if the
inode has not changed in between. A failed sync poisons the mount.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator

import trio

from deltapool.cas.digest import Read
from deltapool.fs.classes import FileClass
from deltapool.fs.delta import Delta
from deltapool.fs.errors import FilesystemError, NoSpace
from deltapool.fs.files import Files
from deltapool.fs.inode import Ino, Inode
from deltapool.fs.inodes import join
from deltapool.fs.instant import Findings, Instant, examine
from deltapool.fs.journal import Journal
from deltapool.fs.names import Names
from deltapool.fs.namespace import LiveNote
from deltapool.fs.ship import deltas
from deltapool.fs.state import LIVE_DIRECTORIES

log = logging.getLogger(__name__)

Sink = Callable[[Iterator[Delta]], Callable[[], None]]
"""Takes the deltas of one note of one journal, all of them, in a thread. The note may turn out not to count; if it
does, what was returned is called, on the loop. Tests record deltas with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Due:
    """A journal that is being noted."""

    inode: Inode
    journal: Journal
    instant: Instant
    name: bytes  # its path in the volume; asked for only if there is a sink


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    findings: Findings
    counts: Callable[[], None]  # to be called if the note counts


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
        self.missing: set[Ino] = set()  # dirty ones whose live file somebody removed from outside: they stay dirty
        files.hurry = lambda: self.hurry.set()

    # --- journals

    async def note(self, *, everything: bool = False) -> None:
        """Notes every journal that changed; `everything` ends hold-backs too."""
        async with self.note_lock:
            due: list[Due] = []
            now = self.clock.steady()
            for inode in list(self.inodes.dirty.values()):
                if inode.file_class != FileClass.JOURNAL:
                    continue
                journal = self.files.journal(inode)
                if not self._is_there(inode):
                    continue
                if journal.held and (everything or now - inode.changed_at >= self.limits.hold_back_seconds):
                    with contextlib.suppress(NoSpace):  # it stays held, and is tried again
                        self.files.end_hold(inode)
                if journal.wants_note:
                    name = self._name(inode) if self.sink is not None else b""
                    due.append(Due(inode, journal, journal.begin_note(inode.mtime_ns), name))
            if due:
                await self._note(due)

    def _name(self, inode: Inode) -> bytes:
        name = self.namespace.first_name(inode.ino)
        assert name is not None, "what is dirty has a name"
        return join(self.inodes.path(name.parent), name.name)

    async def _note(self, due: list[Due]) -> None:
        found: dict[Ino, Found | None] = {}

        async def look(each: Due) -> None:
            path = self.store.path(each.inode.ino, new=each.inode.ino in self.store.rewriting)
            found[each.inode.ino] = await trio.to_thread.run_sync(self._look, path, each)

        try:
            async with trio.open_nursery() as nursery:
                for each in due:
                    nursery.start_soon(look, each)
        except* OSError as errors:
            self.database.fail(f"a journal could not be made durable: {errors.exceptions[0]}")
        if self.database.failure is not None:
            return
        if not self.database.has_room():
            for each in due:
                self._end_note(each, None)  # durable, but not noted: it is tried again
            return
        self.database.begin()
        for each in due:
            self._end_note(each, found[each.inode.ino])
        self.database.commit()

    def _end_note(self, due: Due, found: Found | None) -> None:
        inode, instant = due.inode, due.instant
        note = due.journal.end_note(found.findings if found is not None else None)
        if note is None or found is None or inode.journal is not due.journal:
            return
        if instant.ancestor is not None:
            self.store.needed.discard(Ino(instant.ancestor.ino))
        found.counts()
        if inode.nlink == 0:
            return
        self.namespace.note_journal(inode.ino, note)
        self.namespace.note_segments(inode.ino, instant.kept_segments, found.findings.whole_segments)

    def _look(self, path: str, due: Due) -> Found | None:
        """In a thread. None if the file was removed or truncated meanwhile."""
        inode, instant = due.inode, due.instant
        with contextlib.ExitStack() as opened:
            try:
                fd = opened.enter_context(_opened(path))
            except FileNotFoundError:
                return None
            os.fdatasync(fd)
            read, read_ancestor = reader(fd), None
            if instant.ancestor is not None:
                with contextlib.suppress(FileNotFoundError):
                    ancestor = self.store.path(Ino(instant.ancestor.ino))
                    read_ancestor = reader(opened.enter_context(_opened(ancestor)))
            try:
                findings = examine(instant, read, read_ancestor)
                if self.sink is None:
                    return Found(findings, lambda: None)
                return Found(findings, self.sink(deltas(inode.ino, inode.mode, due.name, instant, findings, read)))
            except EOFError:
                return None

    # --- settling

    async def settle(self, *, everything: bool = False) -> None:
        """Makes dirty files clean: durable, noted, without a mark. `everything` takes in those still being written.
        Names become durable too: what is in memory for their sake may be forgotten then."""
        await self._settle(lambda inode: self._ripe(inode, everything))
        if self.database.failure is None:
            await self.database.durable(self.database.committed)

    async def replace(self) -> None:
        """Does that now to the files that were rewritten and closed: until then a crash finds the old ones."""
        await self._settle(lambda inode: inode.ino in self.store.rewriting and not inode.writers)

    async def _settle(self, chosen: Callable[[Inode], bool]) -> None:
        async with self.settle_lock:
            self.hurry = trio.Event()
            dirty = [inode for inode in list(self.inodes.dirty.values()) if self._at_rest(inode) and chosen(inode)]
            batch = [inode for inode in dirty if self.database.failure is None and self._is_there(inode)]
            if not batch:
                return
            for inode in batch:
                self.files.store_times(inode)
            seen = [(inode, inode.changes) for inode in batch]
            try:
                if len(batch) > self.limits.sync_each_files:
                    await trio.to_thread.run_sync(self.store.sync_all)
                else:
                    files = [(inode.ino, inode.ino in self.store.rewriting) for inode in batch]
                    await trio.to_thread.run_sync(self.store.sync_files, files)
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
            return True
        idle = self.clock.steady() - inode.changed_at
        if inode.file_class == FileClass.JOURNAL:
            return idle >= self.limits.journal_idle_seconds
        if inode.ino in self.store.rewriting and inode.writers:
            return idle >= self.limits.rewrite_idle_seconds or self._overdue(inode)
        return True

    def _overdue(self, inode: Inode) -> bool:
        """It has been written anew for so long, without a pause, that the old bytes are no use to anybody."""
        return self.clock.steady() - inode.truncated_at >= self.limits.rewrite_seconds

    def _is_there(self, inode: Inode) -> bool:
        """False if somebody removed the live file from outside. It is named, and blocks no other."""
        try:
            self.store.stat(inode.ino)
        except FileNotFoundError:
            if inode.ino not in self.missing:
                log.error("inode %d: its live file %s is missing", inode.ino, self.store.path(inode.ino))
                self.missing.add(inode.ino)
            return False
        self.missing.discard(inode.ino)
        return True

    def _at_rest(self, inode: Inode) -> bool:
        """There is nothing of it that only the journal in memory knows."""
        if inode.file_class != FileClass.JOURNAL:
            return True
        journal = self.files.journal(inode)
        return not (journal.wants_note or journal.held or journal.is_being_noted)

    async def _replace_old(self, seen: list[tuple[Inode, int]]) -> None:
        """Rewritten files take the place of the old ones; names of live files become durable."""
        for inode, changes in seen:
            whole = inode.changes == changes or self._overdue(inode)
            if inode.ino in self.store.rewriting and inode.nlink and whole:
                self.files.promote(inode)
        fresh = {inode.ino for inode, _ in seen} & self.store.fresh - self.store.rewriting
        folders = {ino % LIVE_DIRECTORIES: ino for ino in fresh}
        if len(folders) > self.limits.sync_each_files:
            await trio.to_thread.run_sync(self.store.sync_all)
        else:
            for ino in folders.values():
                await trio.to_thread.run_sync(self.store.sync_folder, ino)
        self.store.fresh -= fresh

    def _take_over(self, seen: list[tuple[Inode, int]]) -> None:
        unsafe = self.store.rewriting | self.store.fresh
        still = [i for i, changes in seen if i.changes == changes and i.nlink and self._at_rest(i)]
        still = [i for i in still if i.ino not in unsafe]
        self.database.check_writable()
        self.database.begin()
        done: list[Ino] = []
        for inode in still:
            try:
                found = self.store.stat(inode.ino)
            except FileNotFoundError:
                continue  # somebody removed it from outside a moment ago
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
        if not self.database.has_room(frees=True):
            return
        for ino in ripe:
            self.names.dead.pop(ino, None)  # another pass may have been faster
            self.store.rewriting.discard(ino)
            self.store.fresh.discard(ino)
        self.database.begin()
        self.namespace.close_graves(ripe)
        self.database.commit()

    def _remove(self, inodes: list[Ino]) -> None:
        for ino in inodes:
            self.store.remove(ino)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def reader(fd: int) -> Read:
    """Exactly as many bytes as asked for, or EOFError."""

    def read(offset: int, size: int) -> bytes:
        data = os.pread(fd, size, offset)
        if len(data) != size:
            raise EOFError(f"{len(data)} of {size} bytes at {offset}")
        return data

    return read
