"""Attributes of inodes: mode, owner, size, times, extended attributes, and the filesystem's own figures.

`user.*` is kept as given. `user.deltapool.*` is computed, read-only and not listed, so that copying a file with its
attributes never meets it. ACLs and the `trusted` and `security` namespaces are refused in the way that makes programs
go on without them.
"""

import dataclasses
import os

from deltapool.fs.errors import Invalid, NoAttribute, NotPermitted, Unsupported
from deltapool.fs.files import Files
from deltapool.fs.inode import Inode, without_set_id
from deltapool.fs.inodes import Inodes

USER = b"user."
OWN = b"user.deltapool."


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What a setattr asks for; None leaves a field alone. Times in nanoseconds, size in bytes."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None

    @property
    def has_times(self) -> bool:
        return self.atime_ns is not None or self.mtime_ns is not None

    @property
    def has_row(self) -> bool:
        return self.mode is not None or self.uid is not None or self.gid is not None or self.has_times

    @property
    def has_owner(self) -> bool:
        """A chown. One that names neither owner arrives as a request for nothing, and clears set-id bits all the
        same."""
        return self.uid is not None or self.gid is not None or not (self.has_row or self.size is not None)


class Attributes:
    def __init__(self, inodes: Inodes, files: Files) -> None:
        self.inodes = inodes
        self.files = files
        self.database = inodes.database
        self.namespace = inodes.namespace

    def change(self, inode: Inode, changes: Changes) -> None:
        """chmod, chown, truncate and utimens, in one or apart."""
        if changes.size is not None:
            self.files.truncate(inode, changes.size)
            self.files.close_live(inode)
        if not changes.has_row and changes.size is not None:
            return
        if inode.nlink == 0:
            self._apply(inode, changes)
            return
        self.database.check_writable()
        if changes.has_times and inode.is_file:
            self.files.prepare_times(inode)
        with self.database.operation():
            self._apply(inode, changes)
            self.namespace.touch(inode)

    def _apply(self, inode: Inode, changes: Changes) -> None:
        if changes.mode is not None:
            inode.mode = (inode.mode & ~0o7777) | (changes.mode & 0o7777)
        if changes.has_owner:
            inode.uid = inode.uid if changes.uid is None else changes.uid
            inode.gid = inode.gid if changes.gid is None else changes.gid
            if not inode.is_directory:
                inode.mode = without_set_id(inode.mode)
        if changes.has_times:
            inode.atime_ns = inode.atime_ns if changes.atime_ns is None else changes.atime_ns
            inode.mtime_ns = inode.mtime_ns if changes.mtime_ns is None else changes.mtime_ns
            self.inodes.clock.seen(inode.mtime_ns)
            if inode.is_file:
                self.files.times_given(inode)
        inode.ctime_ns = self.inodes.clock.now_ns()

    # --- extended attributes

    def get_xattr(self, inode: Inode, name: bytes) -> bytes:
        if name.startswith(OWN):
            return self._computed(inode, name[len(OWN) :])
        if name == USER:
            raise Invalid("a name of nothing but its namespace")
        if inode.nlink == 0:
            value = self._kept(inode).get(name)
        else:
            value = self.namespace.xattr(inode.ino, name) if name.startswith(USER) else None
        if value is None:
            raise NoAttribute(f"{name!r}")
        return value

    def _computed(self, inode: Inode, name: bytes) -> bytes:
        if name == b"class" and inode.is_file:
            return inode.file_class.label.encode()
        if name == b"durable":
            names = inode.transaction <= self.database.synced
            return b"yes" if names and (not inode.is_file or self.files.is_durable(inode)) else b"no"
        raise NoAttribute(f"{name!r}")

    def _kept(self, inode: Inode) -> dict[bytes, bytes]:
        """The attributes of an open inode without a name: nothing of it is in the namespace any more."""
        if inode.xattrs is None:
            inode.xattrs = {}
        return inode.xattrs

    def list_xattrs(self, inode: Inode) -> list[bytes]:
        return sorted(self._kept(inode)) if inode.nlink == 0 else self.namespace.xattrs(inode.ino)

    def set_xattr(self, inode: Inode, name: bytes, value: bytes) -> None:
        self._check_name(name)
        if inode.nlink == 0:
            self._kept(inode)[name] = value
            inode.ctime_ns = self.inodes.clock.now_ns()
            return
        with self.database.operation():
            self.namespace.set_xattr(inode.ino, name, value)
            inode.ctime_ns = self.inodes.clock.now_ns()
            self.namespace.touch(inode)

    def remove_xattr(self, inode: Inode, name: bytes) -> None:
        self._check_name(name)
        if inode.nlink == 0:
            if self._kept(inode).pop(name, None) is None:
                raise NoAttribute(f"{name!r}")
            inode.ctime_ns = self.inodes.clock.now_ns()
            return
        with self.database.operation(frees=True):
            if not self.namespace.remove_xattr(inode.ino, name):
                raise NoAttribute(f"{name!r}")
            inode.ctime_ns = self.inodes.clock.now_ns()
            self.namespace.touch(inode)

    def _check_name(self, name: bytes) -> None:
        if name.startswith(OWN):
            raise NotPermitted(f"{name!r} is computed")
        if not name.startswith(USER):
            raise Unsupported(f"{name!r}: only user.* is kept")
        if name == USER:
            raise Invalid("a name of nothing but its namespace")

    # --- the filesystem

    def statvfs(self) -> tuple[os.statvfs_result, int]:
        """The figures of the backing disk, and how many bytes of it are reserved."""
        return self.files.space.statvfs(), self.files.space.reserve
