"""The inodes that are in memory, and what everybody above must agree on about them.

One object per inode number, as long as anything about it is pending, open, or within the bound of the cache. The size
and mtime of a regular file are those of its live file: the row is only what was noted last. Paths and classes are
derived here, from the names.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

from deltapool.fs.classes import FileClass, Rules, combine
from deltapool.fs.clock import Clock
from deltapool.fs.config import Limits
from deltapool.fs.errors import NotFound
from deltapool.fs.inode import ROOT, Ino, Inode
from deltapool.fs.livefile import LiveStore
from deltapool.fs.namespace import PRIVATE, Name, Namespace
from deltapool.fs.stats import Stats

EVICT_BATCH = 256


class Inodes:
    def __init__(
        self, namespace: Namespace, store: LiveStore, rules: Rules, clock: Clock, limits: Limits, stats: Stats
    ) -> None:
        self.namespace = namespace
        self.database = namespace.database
        self.store = store
        self.rules = rules
        self.clock = clock
        self.limits = limits
        self.stats = stats
        self.dirty: dict[Ino, Inode] = {}  # content or times not noted yet
        self.doubt: Callable[[Inode], None] | None = None  # told of each inode that is loaded, until the audit ends
        self.tagged: set[Ino] = set()  # directories whose contents are cache: see `tags`
        self._cached: dict[Ino, Inode] = {}
        self._paths: dict[Ino, bytes] = {ROOT: b""}
        self._evict_at = limits.inodes_cached

    # --- the cache

    def get(self, ino: Ino) -> Inode:
        """The inode, loaded if need be. Raises NotFound."""
        inode = self._cached.get(ino)
        if inode is not None:
            return inode
        inode = self.namespace.load(ino)
        if inode is None:
            raise NotFound(f"inode {ino}")
        if inode.is_file:
            with contextlib.suppress(FileNotFoundError):  # missing bytes are found by read, as EIO
                found = self.store.stat(ino)
                inode.size, inode.mtime_ns = found.st_size, found.st_mtime_ns
        if self.doubt is not None:
            self.doubt(inode)
        self.adopt(inode)
        return inode

    def adopt(self, inode: Inode) -> None:
        """A new or just loaded inode enters the cache."""
        self._cached[inode.ino] = inode
        if len(self._cached) > self._evict_at:
            self._evict()

    def _evict(self) -> None:
        """Forgets the oldest entries that nobody needs. Second-chance enough: whatever is asked for again comes back
        at the young end."""
        goal = self.limits.inodes_cached - EVICT_BATCH
        keep: list[Inode] = []
        for ino in list(itertools.islice(self._cached, len(self._cached) - goal)):
            inode = self._cached.pop(ino)
            if inode.pinned or ino in self.dirty or inode.transaction > self.database.synced:
                keep.append(inode)
        for inode in keep:
            self._cached[inode.ino] = inode
        self._evict_at = max(self.limits.inodes_cached, len(self._cached) + EVICT_BATCH)

    def forget(self, ino: Ino) -> None:
        """The kernel has no reference any more. Matters only for an inode without names."""
        inode = self._cached.get(ino)
        if inode is not None and inode.nlink == 0:
            inode.forgotten = True
            if not inode.handles:
                self.discard(inode)

    def discard(self, inode: Inode) -> None:
        self._cached.pop(inode.ino, None)
        self.dirty.pop(inode.ino, None)

    def cached(self, ino: Ino) -> Inode | None:
        """The inode if it is in memory."""
        return self._cached.get(ino)

    def all(self) -> Iterator[Inode]:
        """All that are in memory."""
        return iter(self._cached.values())

    def with_journal(self) -> list[Inode]:
        """Those whose journal is in memory."""
        return [inode for inode in self._cached.values() if inode.journal is not None]

    def __contains__(self, ino: Ino) -> bool:
        return ino in self._cached

    # --- names, paths, classes

    def child(self, parent: Ino, name: bytes) -> Inode | None:
        ino = self.namespace.lookup(parent, name)
        return None if ino is None else self.get(ino)

    def path(self, directory: Ino) -> bytes:
        """The path of a directory below the volume's root: b"" or b"a/b". Raises NotFound if it has been removed."""
        known = self._paths.get(directory)
        if known is not None:
            return known
        steps: list[tuple[Ino, bytes]] = []
        here = directory
        while here not in self._paths:
            name = self.namespace.first_name(here)
            if name is None:
                raise NotFound(f"directory {here} has no name any more")
            steps.append((here, name.name))
            here = name.parent
        path = self._paths[here]
        if len(self._paths) >= self.limits.inodes_cached:
            self.forget_paths()
        for ino, step in reversed(steps):
            path = join(path, step)
            self._paths[ino] = path
        return path

    def forget_paths(self) -> None:
        """A directory was renamed or removed."""
        self._paths = {ROOT: b""}

    def name_class(self, parent: Ino, name: bytes, is_directory: bool) -> FileClass:
        """What the rules say of this one name."""
        return self.rules.classify(join(self.path(parent), name), is_directory, self.is_tagged(parent))

    def is_tagged(self, directory: Ino) -> bool:
        """Whether a tag says that what lies in this directory is a cache."""
        if not self.tagged:
            return False
        here: Ino | None = directory
        while here is not None and here != ROOT:
            if here in self.tagged:
                return True
            name = self.namespace.first_name(here)
            here = name.parent if name else None
        return False

    def is_private(self, name_class: FileClass, inode_class: FileClass) -> bool:
        return inode_class == FileClass.HOST or name_class in PRIVATE

    def decide_class(self, inode: Inode) -> tuple[FileClass, list[tuple[Name, FileClass]]]:
        """The class of an inode over all its names, and what the rules say of each of them."""
        names = [
            (name, self.name_class(name.parent, name.name, inode.is_directory))
            for name in self.namespace.names_of(inode.ino)
        ]
        return combine(file_class for _, file_class in names), names

    def descends(self, directory: Ino, ancestor: Ino) -> bool:
        """Whether `directory` is `ancestor` or lies below it."""
        here = directory
        while here != ancestor:
            if here == ROOT:
                return False
            name = self.namespace.first_name(here)
            if name is None:
                return False
            here = name.parent
        return True

    # --- durability of names

    async def names_durable(self, inode: Inode) -> None:
        """Makes the row of an inode and the names that lead to it survive a power cut, unless they are known to."""
        await self.database.durable(self._names_transaction(inode))

    def names_are_durable(self, inode: Inode) -> bool:
        return self.database.synced >= self._names_transaction(inode)

    def _names_transaction(self, inode: Inode) -> int:
        """The last transaction that changed the row or a name that leads to it, as far as it is not known to be
        durable."""
        if self.database.synced < self.database.committed or self.database.is_open:
            return max(inode.transaction, self._path_transaction(inode))
        return inode.transaction

    def _path_transaction(self, inode: Inode) -> int:
        newest, pending, seen = 0, [inode.ino], set()
        while pending:
            ino = pending.pop()
            if ino in seen or ino == ROOT:
                continue
            seen.add(ino)
            cached = self._cached.get(ino)  # an inode with a transaction that is not durable is never evicted
            if cached is not None:
                newest = max(newest, cached.transaction)
            if newest >= self.database.current:
                return newest
            pending += [name.parent for name in self.namespace.names_of(ino)]
        return newest


def join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def blocks(inode: Inode, store: LiveStore) -> int:
    """512-byte blocks that the live file occupies, as stat reports them."""
    if not inode.is_file:
        return 0
    try:
        if inode.live is not None:
            return os.fstat(inode.live.fd).st_blocks
        return store.stat(inode.ino).st_blocks
    except FileNotFoundError:
        return 0
