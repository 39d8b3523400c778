"""The FUSE adapter: pyfuse3's handlers on one side, plain types on the other. The only place that decides an errno.

Every handler is guarded: what the layers below raise becomes an errno, anything unexpected becomes EIO with a
traceback in the log, and the mount lives on. Results are checked here, since pyfuse3 would fail outside of our reach.
FLUSH is not implemented: it means nothing here.

The request's offset is used for appending handles as well: the kernel takes it from its size under the inode's lock,
and a page written back from a shared mapping arrives with *some* writer's handle, maybe an appending one.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import os
import stat
import typing
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import apsw
import pyfuse3

from deltapool.fs import errors
from deltapool.fs.attributes import Attributes, Changes
from deltapool.fs.files import Files
from deltapool.fs.inode import Ino, Inode
from deltapool.fs.inodes import Inodes, blocks
from deltapool.fs.names import NAME_BYTES_MAX, Names, check_name

log = logging.getLogger(__name__)

CACHE_SECONDS = 86_400.0  # nobody else changes the tree, so the kernel may remember it
DIRECTORY_BATCH = 128
BLOCK_BYTES = 4096
FILES_MAX = 1 << 40
DOTS = 2  # cookies below this belong to "." and ".."

ERRNO: dict[type[errors.FilesystemError], int] = {
    errors.NotFound: errno.ENOENT,
    errors.Exists: errno.EEXIST,
    errors.IsDirectory: errno.EISDIR,
    errors.IsNotDirectory: errno.ENOTDIR,
    errors.NotEmpty: errno.ENOTEMPTY,
    errors.NameTooLong: errno.ENAMETOOLONG,
    errors.Invalid: errno.EINVAL,
    errors.NotPermitted: errno.EPERM,
    errors.Unsupported: errno.EOPNOTSUPP,
    errors.NoAttribute: errno.ENODATA,
    errors.TooManyLinks: errno.EMLINK,
    errors.FileTooLarge: errno.EFBIG,
    errors.NoSpace: errno.ENOSPC,
    errors.ReadOnly: errno.EROFS,
    errors.Damaged: errno.EIO,
}
PASSED_ON = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)  # of the backing filesystem's errors

P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    handler: Callable[Concatenate["Adapter", P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Adapter", P], Coroutine[Any, Any, R]]:
    """The handler answers with what its annotation promises, or with an errno, whatever happens."""
    hint = typing.get_type_hints(handler)["return"]
    expected = typing.get_origin(hint) or hint

    @functools.wraps(handler)
    async def guard(self: "Adapter", /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.inodes.stats.requests += 1
        try:
            result = await handler(self, *args, **kwargs)
            if not isinstance(result, expected):
                raise TypeError(f"{handler.__name__} gave {result!r}")
        except pyfuse3.FUSEError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing may reach pyfuse3, which would end the mount
            raise pyfuse3.FUSEError(self.errno_of(error, handler.__name__)) from None
        return result

    return guard


@dataclasses.dataclass(slots=True)
class Handle:
    inode: Inode
    writable: bool = False


class Adapter(pyfuse3.Operations):
    def __init__(self, inodes: Inodes, files: Files, names: Names, attributes: Attributes) -> None:
        super().__init__()
        self.inodes = inodes
        self.files = files
        self.names = names
        self.attributes = attributes
        self._handles: dict[int, Handle] = {}
        self._next_handle = itertools.count(1)

    def errno_of(self, error: Exception, where: str) -> int:
        """What the caller of a failed request is told."""
        if isinstance(error, errors.FilesystemError):
            if isinstance(error, errors.Damaged):
                log.error("%s: %s", where, error)
            return ERRNO[type(error)]
        if isinstance(error, OSError) and error.errno in PASSED_ON:
            return int(error.errno)
        if isinstance(error, apsw.Error):
            self.inodes.database.fail(f"the namespace failed in {where}: {error}")
        self.inodes.stats.handler_errors += 1
        log.error("%s failed", where, exc_info=error)
        return errno.EIO

    # --- names

    @guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            return self._entry(self.names.lookup(Ino(parent_inode), name))
        except errors.NotFound:
            missing = pyfuse3.EntryAttributes()
            missing.st_ino = pyfuse3.InodeT(0)
            missing.entry_timeout = CACHE_SECONDS
            return missing

    @guarded
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        inode = self.names.create(Ino(parent_inode), name, mode, ctx.uid, ctx.gid, rdev=rdev)
        self.files.close_live(inode)
        return self._entry(inode)

    @guarded
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(self.names.create(Ino(parent_inode), name, stat.S_IFDIR | (mode & 0o7777), ctx.uid, ctx.gid))

    @guarded
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(
            self.names.create(Ino(parent_inode), name, stat.S_IFLNK | 0o777, ctx.uid, ctx.gid, target=target)
        )

    @guarded
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        target = self.inodes.namespace.symlink(Ino(inode))
        if target is None:
            raise errors.Invalid(f"inode {inode} is no symlink")
        return target

    @guarded
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(self.names.link(Ino(inode), Ino(new_parent_inode), new_name))

    @guarded
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.names.unlink(Ino(parent_inode), name)

    @guarded
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.names.rmdir(Ino(parent_inode), name)

    @guarded
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if (
            flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE)
            or flags == pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE
        ):
            raise errors.Invalid(f"rename flags {flags}")
        await self.names.rename(
            Ino(parent_inode_old),
            name_old,
            Ino(parent_inode_new),
            name_new,
            replace=not flags & pyfuse3.RENAME_NOREPLACE,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
        )

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, _ in inode_list:
            try:
                self.inodes.forget(Ino(ino))
            except Exception:
                log.exception("forget of inode %d failed", ino)

    # --- directories

    @guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        directory = self.inodes.get(Ino(inode))
        directory.handles += 1
        return self._handle(Handle(directory))

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        await self._readdir(fh, start_id, token)

    @guarded
    async def _readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._handles[fh].inode
        if start_id < 1 and not pyfuse3.readdir_reply(token, b".", self._entry(directory), 1):
            return
        if start_id < DOTS and not pyfuse3.readdir_reply(
            token, b"..", self._entry(self.names.parent(directory.ino)), DOTS
        ):
            return
        after = max(start_id - DOTS, 0)
        while batch := self.names.entries(directory, after, DIRECTORY_BATCH):
            for name in batch:
                with contextlib.suppress(errors.NotFound):
                    if not pyfuse3.readdir_reply(
                        token, name.name, self._entry(self.inodes.get(name.ino)), name.id + DOTS
                    ):
                        return
            after = batch[-1].id

    @guarded
    async def releasedir(self, fh: int) -> None:
        inode = self._handles.pop(fh).inode
        inode.handles -= 1
        if inode.nlink == 0 and inode.forgotten and not inode.handles:
            self.inodes.discard(inode)

    @guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self.files.sync(self._handles[fh].inode)

    # --- attributes

    @guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._entry(self.inodes.get(Ino(inode)))

    @guarded
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        target = self.inodes.get(Ino(inode))
        self.attributes.change(
            target,
            Changes(
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                size=attr.st_size if fields.update_size else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            ),
        )
        return self._entry(target)

    @guarded
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if not name.startswith(b"user."):
            raise pyfuse3.FUSEError(errno.ENODATA)  # asked by the kernel before every write: no look at the inode
        return self.attributes.get_xattr(self.inodes.get(Ino(inode)), name)

    @guarded
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.attributes.set_xattr(self.inodes.get(Ino(inode)), name, value)

    @guarded
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.attributes.remove_xattr(self.inodes.get(Ino(inode)), name)

    @guarded
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        names = self.attributes.list_xattrs(self.inodes.get(Ino(inode)))
        if not all(isinstance(name, bytes) for name in names):
            raise TypeError(f"listxattr gave {names!r}")
        return names

    @guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        disk, reserve = self.attributes.statvfs()
        result = pyfuse3.StatvfsData()
        result.f_bsize = result.f_frsize = BLOCK_BYTES
        scale = disk.f_frsize
        result.f_blocks = disk.f_blocks * scale // BLOCK_BYTES
        result.f_bfree = disk.f_bfree * scale // BLOCK_BYTES
        result.f_bavail = max(0, disk.f_bavail * scale - reserve) // BLOCK_BYTES
        result.f_files = disk.f_files or FILES_MAX
        result.f_ffree = result.f_favail = disk.f_favail or FILES_MAX
        result.f_namemax = NAME_BYTES_MAX
        return result

    # --- content

    @guarded
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        check_name(name)
        inode = self.inodes.child(Ino(parent_inode), name)
        if inode is None:
            inode = self.names.create(Ino(parent_inode), name, stat.S_IFREG | (mode & 0o7777), ctx.uid, ctx.gid)
            flags &= ~os.O_TRUNC  # nothing to truncate, and its set-id bits stay
        elif flags & os.O_EXCL:
            raise errors.Exists(f"{name!r}")
        return self._open(inode, flags), self._entry(inode)

    @guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return self._open(self.inodes.get(Ino(inode)), flags)

    def _open(self, inode: Inode, flags: int) -> pyfuse3.FileInfo:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        self.files.open(inode, writable=writable)
        if flags & os.O_TRUNC:
            try:
                self.files.truncate(inode, 0)
            except BaseException:
                self.files.release(inode, writable=writable)
                raise
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(self._handle(Handle(inode, writable))), keep_cache=True)

    @guarded
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self.files.read(self._handles[fh].inode, off, size)

    @guarded
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self.files.write(self._handles[fh].inode, off, buf)

    @guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self.files.sync(self._handles[fh].inode)

    @guarded
    async def release(self, fh: int) -> None:
        handle = self._handles.pop(fh)
        self.files.release(handle.inode, writable=handle.writable)
        if handle.writable:
            self.names.released(handle.inode)

    # --- help

    def _handle(self, handle: Handle) -> pyfuse3.FileHandleT:
        number = pyfuse3.FileHandleT(next(self._next_handle))
        self._handles[number] = handle
        return number

    def _entry(self, inode: Inode) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode.ino)
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = CACHE_SECONDS
        entry.st_mode = pyfuse3.ModeT(inode.mode)
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size
        entry.st_blksize = BLOCK_BYTES
        entry.st_blocks = blocks(inode, self.inodes.store)
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        return entry
