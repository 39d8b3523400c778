"""The content of regular files: open, read, write, truncate, sync, release.

Work goes straight to the live file; a journal's writes pass through its fold (`journal`). Two rules hold everywhere
here:

* A dirty mark is committed before the first byte of a clean file changes.
* No `await` between looking at an inode and changing it. What may wait for a disk (a cold read, a sync) is awaited
first, then everything
  is looked at again.
"""

import contextlib
import itertools
import stat
from collections.abc import Callable

import trio

from deltapool.fs.classes import FileClass
from deltapool.fs.errors import Damaged, FileTooLarge, Invalid, IsDirectory, NoSpace, ReadOnly
from deltapool.fs.inode import Inode, without_set_id
from deltapool.fs.inodes import Inodes
from deltapool.fs.journal import Journal
from deltapool.fs.livefile import LiveFile
from deltapool.fs.namespace import NULS_TRUNCATING, JournalNote
from deltapool.fs.space import Space
from deltapool.fs.waiting import both

OFFSET_MAX = (1 << 63) - 1
WARM_TRIES = 3
SYNC_TRIES = 3


class Files:
    def __init__(self, inodes: Inodes, space: Space) -> None:
        self.inodes = inodes
        self.database = inodes.database
        self.store = inodes.store
        self.clock = inodes.clock
        self.limits = inodes.limits
        self.stats = inodes.stats
        self.space = space
        self.store.make_room = self._close_idle
        self.hurry: Callable[[], None] = lambda: None  # asks for the background work to begin at once

    # --- handles

    def open(self, inode: Inode, *, writable: bool) -> None:
        """A handle more. The live file is opened with the first one. Raises Damaged if it is missing."""
        if not inode.is_file:
            raise (
                IsDirectory(f"inode {inode.ino}")
                if inode.is_directory
                else Invalid(f"inode {inode.ino} has no content")
            )
        self.live(inode)
        inode.handles += 1
        inode.writers += writable

    def release(self, inode: Inode, *, writable: bool) -> None:
        """A handle less. With the last writable one a held-back truncation ends, and times go to the live file."""
        inode.handles -= 1
        inode.writers -= writable
        if writable and not inode.writers and self.database.failure is None:
            with contextlib.suppress(NoSpace):  # the background work tries again
                self.end_hold(inode)
            self.store_times(inode)
            if inode.ino in self.store.rewriting:
                self.hurry()
        self.close_live(inode)
        if inode.nlink == 0 and inode.forgotten and not inode.handles:
            self.inodes.discard(inode)

    def live(self, inode: Inode) -> LiveFile:
        if inode.live is None:
            try:
                inode.live = self.store.open(inode.ino)
            except FileNotFoundError:
                raise Damaged(f"the live file of inode {inode.ino} is missing: {self.store.path(inode.ino)}") from None
        return inode.live

    def close_live(self, inode: Inode) -> None:
        """Closes the descriptor unless a handle needs it. Bytes in the page cache are safe without it."""
        if inode.live is not None and not inode.handles:
            inode.live.close()
            inode.live = None

    def _close_idle(self) -> None:
        """Agents have more files open than this process may: half of the descriptors are closed, and opened again when
        they are needed."""
        idle = [inode for inode in self.inodes.all() if inode.live is not None and not inode.live.users]
        for inode in idle[: len(idle) // 2 + 1]:
            assert inode.live is not None
            inode.live.close()
            inode.live = None

    def journal(self, inode: Inode) -> Journal:
        """What is known of an inode of class journal, loaded with the first use."""
        if inode.journal is None:
            namespace = self.inodes.namespace
            note, segments = namespace.journal_note(inode.ino), namespace.segments(inode.ino)
            inode.journal = self._journal(inode, note, segments)
        return inode.journal

    def _journal(self, inode: Inode, note: JournalNote | None, segments: list[tuple[int, bytes, int]]) -> Journal:
        def before_truncation(length: int) -> None:
            self._before_truncation(inode, journal, length)

        journal = Journal(inode.ino, inode.size, note, segments, self.limits.patch_ranges, before_truncation)
        return journal

    def becomes_journal(self, inode: Inode) -> None:
        """A file of another class is a journal from now on, and all of it is new. Inside an operation."""
        journal = inode.journal = self._journal(inode, None, [])
        journal.counts.written, journal.counts.changed = inode.written, inode.size
        journal.nuls = inode.has_nuls or inode.inspected != inode.changes  # until it is looked through
        self.stats.work_written -= inode.written
        inode.written = 0
        self.inodes.namespace.note_journal(inode.ino, journal.note)
        self.inodes.namespace.mark_dirty(inode.ino)
        inode.marked = True
        inode.changed_at = self.clock.steady()
        self.inodes.dirty[inode.ino] = inode

    def may_be_inspected(self, inode: Inode) -> bool:
        return inode.inspected != inode.changes and inode.size <= self.limits.inspect_bytes

    async def inspect(self, inode: Inode) -> None:
        """Finds out, before a file becomes a journal, whether NULs belong in it: to recovery they are lost bytes
        else."""
        live, changes = self.live(inode), inode.changes
        with live.in_use():
            found = await trio.to_thread.run_sync(live.has_nuls)
        inode.inspected, inode.has_nuls = changes, found
        self.close_live(inode)

    # --- reading

    async def read(self, inode: Inode, offset: int, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end of the file."""
        size = min(size, inode.size - offset)
        if size <= 0:
            return b""
        live = self.live(inode)
        if inode.file_class == FileClass.JOURNAL:
            self.journal(inode).counts.read += size
        data = live.read_now(offset, size) if size <= self.limits.inline_read_bytes else None
        if data is None:
            with live.in_use():
                data = await trio.to_thread.run_sync(live.read, offset, size)
        if inode.live is live and len(data) < size:
            self._found_shorter(inode, live)
        return data

    def _found_shorter(self, inode: Inode, live: LiveFile) -> None:
        """The live file ends before the inode does, and nobody here truncated it."""
        if live.stat().st_size < inode.size:
            raise Damaged(
                f"the live file of inode {inode.ino} was shortened from outside: {self.store.path(inode.ino)}"
            )

    # --- changing

    def _may_change(self, inode: Inode) -> None:
        """Raises unless content may change now; commits the dirty mark of a clean file."""
        if inode.marked:
            if self.database.failure is not None:
                raise ReadOnly(self.database.failure)
            return
        if inode.nlink:
            self.database.check_writable()
            self.database.begin()
            self.inodes.namespace.mark_dirty(inode.ino)
            self.database.commit()
        inode.marked = True

    def _changed(self, inode: Inode, size: int) -> None:
        if size != inode.size:
            if inode.nlink:
                self.stats.resized(inode.file_class, size - inode.size)
            inode.size = size
        inode.mtime_ns = inode.ctime_ns = self.clock.now_ns()
        inode.times_set = True
        inode.changes += 1
        inode.changed_at = self.clock.steady()
        if inode.nlink:
            self.inodes.dirty[inode.ino] = inode
        if inode.mode & (stat.S_ISUID | stat.S_ISGID):
            self._clear_set_id(inode)

    def _clear_set_id(self, inode: Inode) -> None:
        mode = without_set_id(inode.mode)
        if mode != inode.mode and inode.nlink:
            with self.database.operation():
                inode.mode = mode
                self.inodes.namespace.touch(inode)

    async def write(self, inode: Inode, offset: int, data: bytes) -> int:
        """Returns how many bytes were written: fewer than given if the disk filled up on the way."""
        if offset + len(data) > OFFSET_MAX:
            raise FileTooLarge(f"offset {offset}")
        while inode.file_class == FileClass.JOURNAL:
            if inode.awaits_truncation:
                await self._sync_truncation(inode)
            elif (old := await self._old_bytes(inode, offset, len(data))) is not None:
                accepted = self._write_journal(inode, offset, data, old)
                if accepted is not None:
                    return accepted
        self.space.take(len(data))
        live = self.live(inode)
        self._may_change(inode)
        count = live.write(offset, data)
        self.stats.live_written += count
        inode.written += count
        if inode.file_class == FileClass.WORK:
            self.stats.work_written += count
        self._changed(inode, max(inode.size, offset + count))
        return count

    async def _old_bytes(self, inode: Inode, offset: int, size: int) -> bytes | None:
        """What a write to a journal is to be compared with. Cold bytes are waited for before anything is decided. None
        if something else must be looked at again first."""
        for tries in itertools.count():
            if inode.file_class != FileClass.JOURNAL or inode.awaits_truncation:
                return None
            live = self.live(inode)
            overlap = self.journal(inode).overlap(offset, size)
            old = live.read_now(offset, overlap) if overlap else b""
            if old is not None:
                return old
            if tries == WARM_TRIES:
                return live.read(offset, overlap)
            with live.in_use():
                await trio.to_thread.run_sync(live.read, offset, overlap)
        raise AssertionError("not reached")

    async def _sync_truncation(self, inode: Inode) -> None:
        """A journal became shorter, and the disk must know before other bytes come where the old ones were. Else it
        may get those first, in the same block, and a power cut leaves the old length, with old bytes behind them."""
        self.store_times(inode)
        live, changes = self.live(inode), inode.changes
        try:
            with live.in_use():
                await self._sync_data(live)
        except OSError as error:
            raise self._unsynced(inode, error) from error
        inode.synced = max(inode.synced, changes)

    def _before_truncation(self, inode: Inode, journal: Journal, length: int) -> None:
        """Its live file is about to become shorter. Where NULs are no sign of lost bytes, recovery must know, durably:
        the zeros that the filesystem below puts behind the new end, in the same block, may reach the disk first. This
        waits for the disk on the loop; it is as rare as such journals are."""
        inode.changes += 1
        inode.truncated = inode.changes
        if not journal.nuls or journal.durable <= length or not inode.nlink:
            return
        note = journal.note._replace(nuls=NULS_TRUNCATING, durable=length)
        if self.database.in_operation:  # it is about to be no journal any more
            self.inodes.namespace.note_journal(inode.ino, note)
            return
        with self.database.operation(frees=True) as transaction:
            self.inodes.namespace.note_journal(inode.ino, note)
            inode.transaction = transaction
        self.database.commit()
        try:
            self.database.sync_now()
        except OSError as error:
            raise self._unsynced(inode, error) from error

    def _write_journal(self, inode: Inode, offset: int, data: bytes, old: bytes) -> int | None:
        """None if the journal was truncated instead, and the write is to be tried again."""
        live, journal = self.live(inode), self.journal(inode)
        self._may_change(inode)
        if journal.has_new_nuls(offset, data):
            self._note_nuls(inode, journal)
        try:
            done = journal.write(live, offset, data, old)
        finally:
            self._changed(inode, journal.visible_length)
        if done is None:
            return None
        self.stats.live_written += done[1]
        return done[0]

    def _note_nuls(self, inode: Inode, journal: Journal) -> None:
        """From now on a NUL in this journal is no sign of lost bytes. Committed before the first one is written."""
        journal.nuls = True
        if inode.nlink:
            with self.database.operation() as transaction:
                self.inodes.namespace.note_journal(inode.ino, journal.note)
                inode.transaction = transaction
            self.database.commit()

    def _note_durable(self, inode: Inode, journal: Journal, length: int) -> None:
        """Where NULs are no sign of lost bytes, recovery must know how far a sync went: see `recover`."""
        length = min(length, journal.visible_length)
        if length > journal.durable:
            with self.database.operation() as transaction:
                journal.durable = length
                self.inodes.namespace.note_journal(inode.ino, journal.note)
                inode.transaction = transaction

    def truncate(self, inode: Inode, length: int) -> None:
        """Sets the length. For a journal a truncation to nothing is held back; for work the old bytes stay until the
        new ones are durable."""
        if length > OFFSET_MAX:
            raise FileTooLarge(f"length {length}")
        live = self.live(inode)
        self._may_change(inode)
        if inode.file_class == FileClass.JOURNAL:
            journal = self.journal(inode)
            if length > journal.visible_length and not journal.nuls:
                self._note_nuls(inode, journal)
            journal.truncate(live, length)
            self._changed(inode, journal.visible_length)
            return
        shorter = length < inode.size
        if length == 0 and shorter and not live.is_new and inode.nlink:
            new = self.store.begin_rewrite(inode.ino)
            if inode.live is not None:
                inode.live.close()
            inode.live = new
            inode.truncated_at = self.clock.steady()
        else:
            live.truncate(length)
        self._changed(inode, length)
        if shorter:
            inode.truncated = inode.changes
        if not inode.writers and inode.ino in self.store.rewriting:
            self.hurry()

    def end_hold(self, inode: Inode) -> None:
        """A truncation that is held back happens now, for real."""
        if inode.journal is not None and inode.journal.held:
            inode.journal.end_hold(self.live(inode))
            inode.size = inode.journal.visible_length
            self.close_live(inode)

    # --- durability

    def is_durable(self, inode: Inode) -> bool:
        """The bytes of a file, under its present name in the store, are known to survive a power cut."""
        return (
            inode.synced >= inode.changes
            and inode.ino not in self.store.fresh
            and inode.ino not in self.store.rewriting
        )

    async def make_durable(self, inode: Inode) -> None:
        """The present bytes of a file survive a power cut when this returns. Other writes may come in meanwhile, for
        those it says nothing."""
        if self.database.failure is not None:
            raise ReadOnly(self.database.failure)
        self.end_hold(inode)
        self.store_times(inode)
        if self.is_durable(inode):
            return
        live, changes, size, truncated = self.live(inode), inode.changes, inode.size, inode.truncated
        try:
            with live.in_use():
                if inode.ino in self.store.fresh and not live.is_new:
                    await both(self._sync_data(live), self._sync_folder(inode))
                else:
                    await self._sync_data(live)
                for _ in range(SYNC_TRIES):
                    if inode.truncated == truncated and (not live.is_new or inode.changes == changes):
                        break
                    # It went on changing, and what replaces the old is whole. Or it became shorter, and grew again.
                    changes, size, truncated = inode.changes, inode.size, inode.truncated
                    await self._sync_data(live)
                if live.is_new and inode.live is live:
                    self.promote(inode)
                if inode.ino in self.store.fresh:
                    await self._sync_folder(inode)
        except OSError as error:
            raise self._unsynced(inode, error) from error
        inode.synced = max(inode.synced, changes)
        self.close_live(inode)
        if inode.journal is not None and inode.journal.nuls and inode.nlink and inode.truncated == truncated:
            self._note_durable(inode, inode.journal, size)

    def _unsynced(self, inode: Inode, error: OSError) -> ReadOnly:
        """A sync failed: nobody knows what is durable, so nothing is written any more."""
        self.database.fail(f"the live file of inode {inode.ino} could not be made durable: {error}")
        return ReadOnly(self.database.failure)

    async def _sync_data(self, live: LiveFile) -> None:
        await trio.to_thread.run_sync(self.store.sync_data, live.fd)

    async def _sync_folder(self, inode: Inode) -> None:
        await trio.to_thread.run_sync(self.store.sync_folder, inode.ino)
        self.store.fresh.discard(inode.ino)

    def promote(self, inode: Inode) -> None:
        """The rewritten bytes, which are durable, replace the old ones."""
        self.store.promote(inode.ino)
        if inode.live is not None:
            inode.live.is_new = False

    async def sync(self, inode: Inode) -> None:
        """fsync: bytes, row and the names that lead to it survive a power cut when this returns."""
        if inode.is_file and inode.nlink:
            if self.inodes.names_are_durable(inode) or self.is_durable(inode):
                await self.make_durable(inode)
            else:  # both at once: what one may not precede, a rename over another file, has waited for its bytes
                await both(self.make_durable(inode), self.inodes.names_durable(inode))
        if inode.nlink:
            await self.inodes.names_durable(inode)

    def store_times(self, inode: Inode) -> None:
        if inode.times_set and inode.is_file:
            self.live(inode).set_times(inode.atime_ns, inode.mtime_ns)
            inode.times_set = False
            self.close_live(inode)

    def prepare_times(self, inode: Inode) -> None:
        """utimens is about to change a regular file: its live file will carry the time."""
        self.live(inode)
        self._may_change(inode)

    def times_given(self, inode: Inode) -> None:
        """utimens has changed the inode: its times go to the live file. A write that is not stored yet does not
        override them."""
        inode.times_set = True
        inode.changes += 1
        inode.changed_at = self.clock.steady()
        if inode.nlink:
            self.inodes.dirty[inode.ino] = inode
        self.store_times(inode)
