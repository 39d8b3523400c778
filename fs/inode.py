"""One inode in memory: what the namespace row says, and what is going on with its live file right now.

Plain data; `inodes` decides when it is loaded, kept and forgotten. Times are nanoseconds since the epoch.
"""

import dataclasses
import stat
from typing import TYPE_CHECKING, NewType

from deltapool.fs.classes import FileClass

if TYPE_CHECKING:
    from deltapool.fs.journal import Journal
    from deltapool.fs.livefile import LiveFile

Ino = NewType("Ino", int)
ROOT = Ino(1)


@dataclasses.dataclass(slots=True, eq=False)
class Inode:
    ino: Ino
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    file_class: FileClass
    # From here on: not in the row.
    transaction: int = 0  # the last transaction that changed the row or a name of it
    handles: int = 0  # open files and directories
    writers: int = 0  # those that may write
    forgotten: bool = False  # the kernel has no reference any more
    marked: bool = False  # a dirty mark is committed
    changes: int = 0  # counts content changes of this mount's life, to see what happened during an await
    times_set: bool = False  # the live file's mtime is behind ours
    changed_at: float = 0.0  # the clock's reading at the last content change
    synced: int = 0  # the value of `changes` whose bytes are known to be durable
    truncated: int = 0  # the value of `changes` with which the live file became shorter, last
    truncated_at: float = 0.0  # the clock's reading when the rewrite beside the old bytes began
    inspected: int = -1  # the value of `changes` at which the file was looked through for NULs
    has_nuls: bool = True  # what was found then
    xattrs: dict[bytes, bytes] | None = None  # once it has no name: they are kept nowhere else
    written: int = 0  # bytes that agents wrote while it was no journal, in this mount's life
    live: "LiveFile | None" = None  # open while there are handles or something is pending
    journal: "Journal | None" = None  # while a journal is open or has something to note

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def awaits_truncation(self) -> bool:
        """Whether the live file became shorter, and that is not known to be durable. Without a name it need not be."""
        return self.truncated > self.synced and self.nlink > 0

    @property
    def pinned(self) -> bool:
        """Something would be lost, or answered wrongly, if this object were forgotten."""
        return self.handles > 0 or self.marked or self.live is not None or self.nlink == 0


def without_set_id(mode: int) -> int:
    """The mode after a change of content or owner: no setuid, no setgid where the group may execute."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode
