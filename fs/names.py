"""Names: create, link, rename, remove, list. Each operation is one savepoint: all of it or nothing.

Checks come first, then statements, then the objects in memory; nothing is awaited in between. Renaming over a file
waits, before that, until the bytes of the new one are durable: no transaction may become durable before them. The
class of an inode is decided anew whenever its names change.
"""

import stat

from deltapool.fs.classes import FileClass, combine
from deltapool.fs.errors import (
    Exists,
    Invalid,
    IsDirectory,
    IsNotDirectory,
    NameTooLong,
    NotEmpty,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from deltapool.fs.files import Files
from deltapool.fs.inode import ROOT, Ino, Inode
from deltapool.fs.inodes import Inodes, join
from deltapool.fs.instant import Ancestor
from deltapool.fs.namespace import Name
from deltapool.fs.stats import JournalCounts
from deltapool.fs.tags import Tags

NAME_BYTES_MAX = 255
LINKS_MAX = 65_000
LINKS_MANY = 32  # with more names than this, an inode's class is not decided anew over all of them for a plain one
SYNC_TRIES = 3


class Names:
    def __init__(self, inodes: Inodes, files: Files) -> None:
        self.inodes = inodes
        self.files = files
        self.database = inodes.database
        self.namespace = inodes.namespace
        self.stats = inodes.stats
        self.tags = Tags(inodes)
        self.dead: dict[
            Ino, int
        ] = {}  # inodes without a name, and the transaction that must be durable before their bytes go

    # --- looking

    def lookup(self, parent: Ino, name: bytes) -> Inode:
        check_name(name)
        if name == b".":
            return self.inodes.get(parent)
        if name == b"..":
            return self.parent(parent)
        found = self.inodes.child(parent, name)
        if found is None:
            raise NotFound(f"{name!r} in directory {parent}")
        return found

    def parent(self, directory: Ino) -> Inode:
        name = self.namespace.first_name(directory)
        return self.inodes.get(ROOT if name is None else name.parent)

    def entries(self, directory: Inode, after: int, limit: int) -> list[Name]:
        """Entries in the order in which they were made, from the one with the next higher id on."""
        return self.namespace.entries(directory.ino, after, limit) if directory.nlink else []

    # --- making

    def create(
        self, parent: Ino, name: bytes, mode: int, uid: int, gid: int, *, rdev: int = 0, target: bytes | None = None
    ) -> Inode:
        """A new inode of any kind with its first name. A regular file gets its live file, which is left open, and is
        dirty from birth."""
        directory = self._directory(parent)
        self._check_free(directory, name)
        is_directory = stat.S_ISDIR(mode)
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            mode |= stat.S_ISGID if is_directory else 0
        name_class = self.inodes.name_class(parent, name, is_directory)
        file_class = combine([name_class])
        self.database.check_writable()
        ino = self.namespace.new_ino()
        now = self.inodes.clock.now_ns()
        size = len(target) if target is not None else 0
        inode = Inode(ino, mode, uid, gid, 2 if is_directory else 1, rdev, size, now, now, now, file_class)
        live = self.inodes.store.create(ino) if inode.is_file else None
        try:
            with self.database.operation():
                self.namespace.add_name(parent, name, ino, self.inodes.is_private(name_class, file_class))
                if target is not None:
                    self.namespace.set_symlink(ino, target)
                if live is not None:
                    self.namespace.mark_dirty(ino)
                self.namespace.touch(inode)
                self._entry_changed(directory, now, 1 if is_directory else 0)
        except BaseException:
            if live is not None:
                live.close()
                self.inodes.store.remove(ino)
            raise
        self.inodes.adopt(inode)
        if live is not None:
            inode.live = live
            inode.marked = True
            inode.times_set = True  # the live file has times of its own
            inode.changes = 1
            inode.changed_at = self.inodes.clock.steady()
            self.inodes.dirty[ino] = inode
            self.stats.appeared(file_class, 0)
        return inode

    def link(self, ino: Ino, parent: Ino, name: bytes) -> Inode:
        inode, directory = self.inodes.get(ino), self._directory(parent)
        if inode.is_directory:
            raise NotPermitted("a directory has one name")
        if inode.nlink == 0:
            raise NotFound(f"inode {ino} has no name any more")
        if inode.nlink >= LINKS_MAX:
            raise TooManyLinks(f"inode {ino} has {inode.nlink} names")
        self._check_free(directory, name)
        self.files.end_hold(inode)
        now = self.inodes.clock.now_ns()
        name_class = self.inodes.name_class(parent, name, False)
        with self.database.operation():
            self.namespace.add_name(parent, name, ino, self.inodes.is_private(name_class, inode.file_class))
            if inode.nlink <= LINKS_MANY or combine((inode.file_class, name_class)) != inode.file_class:
                self._decide_class(inode)
            inode.nlink += 1
            inode.ctime_ns = now
            self.namespace.touch(inode)
            self._entry_changed(directory, now, 0)
        self._tag_changed(parent, name)
        return inode

    # --- removing

    def unlink(self, parent: Ino, name: bytes) -> None:
        directory, inode = self._directory(parent), self.lookup(parent, name)
        if inode.is_directory:
            raise IsDirectory(f"{name!r}")
        now = self.inodes.clock.now_ns()
        with self.database.operation(frees=True):
            self.namespace.remove_name(parent, name)
            self._unnamed(inode, now)
            self._entry_changed(directory, now, 0)
        self._tag_changed(parent, name)

    def rmdir(self, parent: Ino, name: bytes) -> None:
        if name == b".":
            raise Invalid("a directory is not removed through itself")
        directory, inode = self._directory(parent), self.lookup(parent, name)
        if not inode.is_directory:
            raise IsNotDirectory(f"{name!r}")
        if not self.namespace.is_empty(inode.ino):
            raise NotEmpty(f"{name!r}")
        now = self.inodes.clock.now_ns()
        with self.database.operation(frees=True):
            self.namespace.remove_name(parent, name)
            self._unnamed(inode, now)
            self._entry_changed(directory, now, -1)

    def _unnamed(self, inode: Inode, now: int) -> None:
        """One name less; with the last one the inode is gone, and its live file once nobody has it open. Inside an
        operation."""
        inode.ctime_ns = now
        if inode.nlink > 1 and not inode.is_directory:
            plain = inode.file_class == FileClass.WORK and not self.namespace.has_private_name(inode.ino)
            if inode.nlink <= LINKS_MANY or not plain:
                self._decide_class(inode)
            inode.nlink -= 1
            self.namespace.touch(inode)
            return
        if inode.is_file and inode.file_class == FileClass.JOURNAL:
            self._journal_ends(inode)
        self.namespace.remove_inode(inode)
        inode.nlink = 0
        if inode.is_directory:
            self.inodes.forget_paths()
            return
        self.inodes.dirty.pop(inode.ino, None)
        if inode.is_file:
            self.stats.vanished(inode.file_class, inode.size)
            self.dead[inode.ino] = self.database.current

    # --- renaming

    async def rename(
        self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, *, replace: bool, exchange: bool
    ) -> None:
        """`replace` false: fails if the new name exists. `exchange`: both names exist and change places."""
        for _ in range(SYNC_TRIES):
            pending = self._to_sync(parent, name, new_parent, new_name, replace, exchange)
            unknown = self._to_inspect(parent, name, new_parent, new_name)
            if not pending and unknown is None:
                break
            for inode in pending:
                await self.files.make_durable(inode)
            if unknown is not None:
                await self.files.inspect(unknown)
        source_dir, target_dir = self._directory(parent), self._directory(new_parent)
        source = self.lookup(parent, name)
        check_name(new_name)
        target = self.inodes.child(new_parent, new_name)
        self._check_rename(source, target, new_parent, replace=replace, exchange=exchange)
        if target is not None and exchange:
            self._exchange(source_dir, name, source, target_dir, new_name, target)
        elif source is not target:
            self._move(source_dir, name, source, target_dir, new_name, target)

    def _to_sync(
        self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes, replace: bool, exchange: bool
    ) -> list[Inode]:
        """The files whose bytes must be durable before this rename puts them in the place of others, or makes
        journals of them."""
        check_name(new_name)
        source, target = self.lookup(parent, name), self.inodes.child(new_parent, new_name)
        if source is target or (target is not None and not (replace or exchange)):
            return []
        if target is None and self.inodes.name_class(new_parent, new_name, source.is_directory) != FileClass.JOURNAL:
            return []
        replacing = [source, target] if exchange and target is not None else [source]
        return [inode for inode in replacing if inode.is_file and not self.files.is_durable(inode)]

    def _to_inspect(self, parent: Ino, name: bytes, new_parent: Ino, new_name: bytes) -> Inode | None:
        """The file that this rename makes a journal of, unless it is known whether it holds NULs."""
        source = self.lookup(parent, name)
        if not source.is_file or source.file_class == FileClass.JOURNAL or not self.files.may_be_inspected(source):
            return None
        return source if self.inodes.name_class(new_parent, new_name, False) == FileClass.JOURNAL else None

    def _check_rename(
        self, source: Inode, target: Inode | None, new_parent: Ino, *, replace: bool, exchange: bool
    ) -> None:
        if target is None:
            if exchange:
                raise NotFound("both names of an exchange must exist")
        elif not replace and not exchange:
            raise Exists("the new name is taken")
        elif not exchange and source is not target:
            if target.is_directory and not source.is_directory:
                raise IsDirectory("a file does not replace a directory")
            if source.is_directory and not target.is_directory:
                raise IsNotDirectory("a directory does not replace a file")
            if target.is_directory and not self.namespace.is_empty(target.ino):
                raise NotEmpty("the directory to be replaced has entries")
        if source.is_directory and self.inodes.descends(new_parent, source.ino):
            raise Invalid("a directory cannot move below itself")

    def _move(
        self, source_dir: Inode, name: bytes, source: Inode, target_dir: Inode, new_name: bytes, target: Inode | None
    ) -> None:
        self.files.end_hold(source)
        if target is not None:
            self.files.end_hold(target)
        now = self.inodes.clock.now_ns()
        old_path = self._path(source_dir, name) if source.is_directory else b""
        with self.database.operation():
            heritage = self._heritage(source, target)
            if target is not None:
                self.namespace.remove_name(target_dir.ino, new_name)
                self._unnamed(target, now)
            self.namespace.remove_name(source_dir.ino, name)
            self.namespace.add_name(target_dir.ino, new_name, source.ino, False)
            new_path = self._path(target_dir, new_name) if source.is_directory else b""
            self._renamed(source, source_dir, old_path, target_dir, new_path, now)
            if heritage is not None:
                self._inherit(source, *heritage)
            gone = 1 if target is not None and target.is_directory else 0
            moved = 1 if source.is_directory else 0
            self._entry_changed(source_dir, now, -moved)
            self._entry_changed(target_dir, now, moved - gone)
        self._tag_changed(source_dir.ino, name)
        self._tag_changed(target_dir.ino, new_name)

    def _exchange(
        self, source_dir: Inode, name: bytes, source: Inode, target_dir: Inode, new_name: bytes, target: Inode
    ) -> None:
        if target.is_directory and self.inodes.descends(source_dir.ino, target.ino):
            raise Invalid("a directory cannot move below itself")
        if source is target:
            return
        self.files.end_hold(source)
        self.files.end_hold(target)
        now = self.inodes.clock.now_ns()
        source_path, target_path = self._path(source_dir, name), self._path(target_dir, new_name)
        with self.database.operation():
            self.namespace.remove_name(source_dir.ino, name)
            self.namespace.remove_name(target_dir.ino, new_name)
            self.namespace.add_name(target_dir.ino, new_name, source.ino, False)
            self.namespace.add_name(source_dir.ino, name, target.ino, False)
            self._renamed(source, source_dir, source_path, target_dir, target_path, now)
            self._renamed(target, target_dir, target_path, source_dir, source_path, now)
            difference = int(target.is_directory) - int(source.is_directory)
            self._entry_changed(source_dir, now, difference)
            self._entry_changed(target_dir, now, -difference)
        self._tag_changed(source_dir.ino, name)
        self._tag_changed(target_dir.ino, new_name)

    def _renamed(
        self, inode: Inode, old_dir: Inode, old_path: bytes, new_dir: Inode, new_path: bytes, now: int
    ) -> None:
        if inode.is_directory:
            self.inodes.forget_paths()
        self._decide_class(inode)
        inode.ctime_ns = now
        self.namespace.touch(inode)
        if inode.is_directory:
            tagged = self.inodes.is_tagged(old_dir.ino) != self.inodes.is_tagged(new_dir.ino)
            if tagged or self.inodes.rules.may_change_below(old_path, new_path):
                self._decide_below(inode.ino)

    def _heritage(self, source: Inode, target: Inode | None) -> tuple[Ancestor, JournalCounts] | None:
        """If a file takes the place of a journal: that journal, to be compared when the file is noted, and its
        counts, which go on."""
        if (
            target is None
            or target.file_class != FileClass.JOURNAL
            or target.nlink > 1
            or not (source.is_file and target.is_file)
        ):
            return None
        journal = self.files.journal(target)
        counts, journal.counts = journal.counts, JournalCounts()
        return journal.replaced_by(source.size), counts

    def _inherit(self, source: Inode, ancestor: Ancestor, counts: JournalCounts) -> None:
        needed = self.inodes.store.needed
        if source.file_class != FileClass.JOURNAL:  # another name of it is a host file's
            self._count_gone(counts)
        elif self.files.journal(source).inherit(ancestor, counts):
            needed.add(Ino(ancestor.ino))
            return
        needed.discard(Ino(ancestor.ino))

    def _journal_ends(self, inode: Inode) -> None:
        """A journal is no more, or no journal any more. Inside an operation."""
        journal = self.files.journal(inode)
        self._count_gone(journal.counts)
        if journal.ancestor is not None:
            self.inodes.store.needed.discard(Ino(journal.ancestor.ino))

    def _count_gone(self, counts: JournalCounts) -> None:
        self.stats.gone.add(counts)
        self.namespace.set_gone(self.stats.gone)

    # --- classes

    def _decide_class(self, inode: Inode) -> None:
        """Decides the class over all names, and the table for each of them. Inside an operation."""
        file_class, names = self.inodes.decide_class(inode)
        for name, name_class in names:
            self.namespace.set_privacy(name, self.inodes.is_private(name_class, file_class))
        if inode.is_file and file_class != inode.file_class:
            self._reclassify(inode, file_class)
        inode.file_class = file_class

    def _reclassify(self, inode: Inode, file_class: FileClass) -> None:
        self.files.end_hold(inode)
        self.stats.vanished(inode.file_class, inode.size)
        self.stats.appeared(file_class, inode.size)
        if inode.file_class == FileClass.JOURNAL:
            self._journal_ends(inode)
            self.namespace.forget_journal(inode.ino)
            inode.journal = None
        inode.file_class = file_class
        self.namespace.touch(inode)
        if file_class == FileClass.JOURNAL:
            self.files.becomes_journal(inode)

    def released(self, inode: Inode) -> None:
        """A writer of a file let go of it: it may have written a cache tag."""
        if self.tags.enabled and inode.nlink:
            for name in self.namespace.names_of(inode.ino):
                self._tag_changed(name.parent, name.name)

    def _tag_changed(self, directory: Ino, name: bytes) -> None:
        if self.tags.concerns(name) and self.tags.changed(directory):
            with self.database.operation():
                self._decide_below(directory)

    def _decide_below(self, directory: Ino) -> None:
        """Every descendant of a renamed directory may have changed class. Inside an operation."""
        pending = [directory]
        while pending:
            for name in self.namespace.children(pending.pop()):
                inode = self.inodes.get(name.ino)
                self._decide_class(inode)
                if inode.is_directory:
                    pending.append(inode.ino)

    # --- help

    def _directory(self, ino: Ino) -> Inode:
        directory = self.inodes.get(ino)
        if not directory.is_directory:
            raise IsNotDirectory(f"inode {ino}")
        if directory.nlink == 0:
            raise NotFound(f"directory {ino} has been removed")
        return directory

    def _check_free(self, directory: Inode, name: bytes) -> None:
        check_name(name)
        if name in (b".", b"..") or self.namespace.lookup(directory.ino, name) is not None:
            raise Exists(f"{name!r}")

    def _path(self, directory: Inode, name: bytes) -> bytes:
        return join(self.inodes.path(directory.ino), name)

    def _entry_changed(self, directory: Inode, now: int, subdirectories: int) -> None:
        directory.mtime_ns = directory.ctime_ns = now
        directory.nlink += subdirectories
        self.namespace.touch(directory)


def check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLong(f"{len(name)} bytes")
    if not name or b"/" in name or b"\0" in name:
        raise Invalid(f"{name!r} is no name")
