"""What happens between an end of the last mount, clean or not, and the first request of the next.

`recover` runs before the mount answers and looks at dirty inodes and graves only, so its time depends on what was in
flight, not on what exists. `Audit` runs beside the mount: it compares every clean live file with what was noted of
it, and finds what a power cut took from the marks or somebody changed from outside.

After an unclean stop a dirty inode is dirty whole, and its size and mtime are those of its live file. A rewritten
file whose new bytes were not known to be durable is the old one again. A journal that never had a NUL ends before its
first one: the filesystem below may have kept a length whose bytes it lost.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib

import trio

from deltapool.fs.classes import FileClass
from deltapool.fs.database import open_connection
from deltapool.fs.errors import FilesystemError, NoSpace
from deltapool.fs.files import Files
from deltapool.fs.inode import Ino, Inode
from deltapool.fs.inodes import Inodes
from deltapool.fs.livefile import LiveStore
from deltapool.fs.namespace import NULS, NULS_TRUNCATING, JournalNote, LiveNote, Namespace
from deltapool.fs.state import LIVE_DIRECTORIES, LIVE_FOLDER, LOST_FOLDER

BLOCK = 1 << 20
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
AUDIT_BATCH = 512
RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Recovery:
    clean: bool = True
    same_boot: bool = True
    dirty: list[Ino] = dataclasses.field(default_factory=list)
    restored: list[Ino] = dataclasses.field(default_factory=list)  # unfinished rewrites, dropped for the old content
    trimmed: list[Ino] = dataclasses.field(default_factory=list)  # journals that had a lost tail
    missing: list[Ino] = dataclasses.field(default_factory=list)  # created, never synced, bytes lost

    def summary(self) -> str:
        return (
            f"{len(self.restored)} unfinished rewrites undone, {len(self.trimmed)} journals without their lost tail, "
            f"{len(self.missing)} files without bytes"
        )


def recover(namespace: Namespace, store: LiveStore) -> Recovery:
    """Puts the state in order after the last mount. Everything it finds is durable when it returns."""
    boot = BOOT_ID.read_text().strip()
    result = Recovery(clean=namespace.meta("clean") == 1, same_boot=namespace.meta("boot") == boot)
    graves = namespace.graves()
    if graves:
        namespace.database.sync_now()  # what was committed need not be durable, and bytes go only after their name
    for ino in graves:
        store.remove(ino)
    for ino in namespace.dirty():
        inode = namespace.load(ino)
        if inode is not None and inode.is_file:
            _recover_file(namespace, store, inode, result)
    _sync(store, result.dirty, namespace.database.limits.sync_each_files)
    namespace.database.begin()
    for ino in result.dirty:
        inode = namespace.load(ino)
        assert inode is not None
        found = store.stat(ino)
        inode.size = found.st_size
        if namespace.live_note(ino) != LiveNote(found.st_size, found.st_mtime_ns, found.st_ctime_ns):
            inode.mtime_ns, inode.ctime_ns = found.st_mtime_ns, max(inode.ctime_ns, found.st_mtime_ns)
        namespace.touch(inode)
        note = namespace.journal_note(ino)
        if note is not None and note.nuls:
            namespace.note_journal(ino, note._replace(nuls=NULS, durable=found.st_size))
    namespace.close_graves(graves)
    namespace.set_meta("clean", 0)
    namespace.set_meta("boot", boot)
    if not result.clean:
        namespace.skip_numbers()
    namespace.database.commit()
    namespace.database.sync_now()
    return result


def _sync(store: LiveStore, dirty: list[Ino], each_max: int) -> None:
    """Few files are synced one by one: syncfs waits for what others have written to this disk, too."""
    if len(dirty) > each_max:
        store.sync_all()
        return
    store.sync_files((ino, False) for ino in dirty)
    for ino in {ino % LIVE_DIRECTORIES: ino for ino in dirty}.values():
        store.sync_folder(ino)


def _recover_file(namespace: Namespace, store: LiveStore, inode: Inode, result: Recovery) -> None:
    ino = inode.ino
    new = pathlib.Path(store.path(ino, new=True))
    if new.exists():
        new.unlink()
        result.restored.append(ino)
    if not os.path.exists(store.path(ino)):
        if namespace.live_note(ino) is not None:  # its bytes were durable once: no crash has taken them
            log.error("inode %d: its live file %s is missing", ino, store.path(ino))
            return
        os.close(os.open(store.path(ino), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        result.missing.append(ino)
    if inode.file_class == FileClass.JOURNAL and not result.clean and cut_lost_tail(namespace, store, ino, result):
        result.trimmed.append(ino)
    result.dirty.append(ino)


def cut_lost_tail(namespace: Namespace, store: LiveStore, ino: Ino, recovery: Recovery) -> bool:
    """After an unclean stop: ends a dirty journal before its first byte that was lost, and has its digest taken anew.

    A journal that never had a NUL ends before its first one. One that has some is cut only after another boot (before
    it, the page cache kept everything), and only behind what was durable. If it was being truncated to that, it ends
    there: the filesystem below may have filled the last block with zeros before the new length was durable."""
    note = namespace.journal_note(ino)
    length = first_lost(store.path(ino), note, same_boot=recovery.same_boot)
    if length is not None:
        os.truncate(store.path(ino), length)
    if note is not None:
        namespace.database.begin()
        namespace.note_journal(ino, note._replace(length=-1))
    return length is not None


def first_lost(path: str, note: JournalNote | None, *, same_boot: bool) -> int | None:
    """Where a journal ends after an unclean stop, None if it is whole."""
    if note is None or not note.nuls:
        return first_nul(path)
    if same_boot:
        return None
    if note.nuls == NULS_TRUNCATING and os.stat(path).st_size > note.durable:
        return note.durable
    return first_nul(path, note.durable)


def first_nul(path: str, start: int = 0) -> int | None:
    """Where the first NUL byte of a file at or behind `start` is."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        at = start
        while block := file.read(BLOCK):
            found = block.find(0)
            if found >= 0:
                return at + found
            at += len(block)
    return None


def resume(files: Files, recovery: Recovery) -> None:
    """Dirty inodes are known as dirty in memory too: the background work settles them."""
    for ino in recovery.dirty:
        inode = files.inodes.get(ino)
        inode.marked = True
        files.inodes.dirty[ino] = inode


class Audit:
    """The comparison beside the mount. `done` tells when it has ended; `changed` holds the inodes that differ from
    their notes: changed from outside if the last stop was clean, else maybe by us, with a mark that a power cut took.

    Until it has ended, after an unclean stop, every journal is compared when it is loaded: nobody sees a lost tail."""

    def __init__(self, inodes: Inodes, folder: pathlib.Path, recovery: Recovery) -> None:
        self.inodes = inodes
        self.folder = folder
        self.recovery = recovery
        self._boundary = inodes.namespace.next_ino
        self.done = False
        self.changed: list[Ino] = []
        self.lost: list[str] = []
        if not recovery.clean:
            inodes.doubt = self._doubt

    async def run(self) -> None:
        namespace, store = self.inodes.namespace, self.inodes.store
        after, postponed = Ino(0), list[tuple[Ino, LiveNote]]()
        while batch := namespace.live_notes(after, AUDIT_BATCH):
            after = batch[-1][0]
            for ino, note in await trio.to_thread.run_sync(_differing, store, batch):
                if not self._found(ino, note):
                    postponed.append((ino, note))
        while postponed:
            await trio.sleep(RETRY_SECONDS)
            postponed = [each for each in postponed if not self._found(*each)]
        self.inodes.doubt = None
        self.lost, strays = await trio.to_thread.run_sync(_set_aside, self.folder, self._boundary)
        for ino in strays:
            if ino not in store.rewriting:  # unfinished, and a power cut has taken the mark that would have told
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(store.path(ino, new=True))
        self.done = True

    def _doubt(self, inode: Inode) -> None:
        """An inode is being loaded: if it is a journal whose mark was lost, it is recovered now."""
        if inode.file_class == FileClass.JOURNAL and inode.ino not in self.inodes.dirty:
            note = self.inodes.namespace.live_note(inode.ino)
            if note is not None and _differing(self.inodes.store, [(inode.ino, note)]):
                with contextlib.suppress(FileNotFoundError):
                    self._mark(inode, note)

    def _found(self, ino: Ino, note: LiveNote) -> bool:
        """A live file differs from its note, which was read a moment ago, or is not there. False if the disk is too
        full to take it as dirty now."""
        try:
            inode = self.inodes.get(ino)
            if not inode.marked and self.inodes.namespace.live_note(ino) == note:
                self._mark(inode, note)
        except NoSpace:
            return False
        except FilesystemError:
            pass
        except FileNotFoundError:
            self.changed.append(ino)
            log.error("inode %d: its live file %s is missing", ino, self.inodes.store.path(ino))
        return True

    def _mark(self, inode: Inode, note: LiveNote) -> None:
        namespace, ino = self.inodes.namespace, inode.ino
        self.inodes.store.stat(ino)  # raises if it is missing: there is nothing to recover then
        namespace.database.check_writable(frees=True)
        namespace.database.begin()
        namespace.mark_dirty(ino)
        if inode.file_class == FileClass.JOURNAL and inode.journal is None:
            if not self.recovery.clean:
                cut_lost_tail(namespace, self.inodes.store, ino, self.recovery)
            elif (known := namespace.journal_note(ino)) is not None:
                namespace.note_journal(ino, known._replace(length=-1))
        namespace.database.commit()
        found = self.inodes.store.stat(ino)
        self.inodes.stats.resized(inode.file_class, found.st_size - note.size)
        inode.size, inode.mtime_ns = found.st_size, found.st_mtime_ns
        inode.marked = True
        inode.changes += 1
        inode.truncated = inode.changes  # maybe: see `Files._sync_truncation`
        self.inodes.dirty[ino] = inode
        self.changed.append(ino)
        log.warning("inode %d: its live file %s is not as it was noted", ino, self.inodes.store.path(ino))


def _differing(store: LiveStore, batch: list[tuple[Ino, LiveNote]]) -> list[tuple[Ino, LiveNote]]:
    differing = []
    for ino, note in batch:
        try:
            found = os.stat(store.path(ino))
        except FileNotFoundError:
            differing.append((ino, note))
            continue
        if note != (found.st_size, found.st_mtime_ns, found.st_ctime_ns):
            differing.append((ino, note))
    return differing


def _set_aside(folder: pathlib.Path, boundary: int) -> tuple[list[str], list[Ino]]:
    """Live files below `boundary` without an inode: what a killed daemon had made in its last uncommitted
    milliseconds, or somebody else. The empty ones are removed, the others kept in `lost/`; their names. And the inodes
    below `boundary` with a rewrite beside them."""
    connection = open_connection(folder / "namespace.db", read_only=True)
    known = "SELECT 1 FROM inode WHERE ino = ?1 UNION ALL SELECT 1 FROM grave WHERE ino = ?1"
    kept: list[str] = []
    strays: list[Ino] = []
    try:
        for number in range(LIVE_DIRECTORIES):
            for entry in os.scandir(folder / LIVE_FOLDER / f"{number:02x}"):
                stem, _, suffix = entry.name.partition(".")
                if not stem.isdigit() or int(stem) >= boundary:
                    continue
                if connection.execute(known, (int(stem),)).fetchone() is not None:
                    if suffix:
                        strays.append(Ino(int(stem)))
                    continue
                with contextlib.suppress(FileNotFoundError):  # its inode was removed, and it itself, a moment ago
                    if entry.stat().st_size:
                        (folder / LOST_FOLDER).mkdir(mode=0o700, exist_ok=True)
                        os.rename(entry.path, folder / LOST_FOLDER / entry.name)
                        kept.append(entry.name)
                        log.warning("%s belongs to no inode: it was moved to %s", entry.path, folder / LOST_FOLDER)
                    else:
                        os.unlink(entry.path)
    finally:
        connection.close()
    return kept, strays
