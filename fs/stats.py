"""What `status` counts: files and bytes of each class, and what agents wrote, changed and read.

The totals by class come from one scan of the namespace (`counting`) and are kept by differences; the counters of
journals live with each journal, and those of journals that are gone are added up here. Nothing in this module does I/O.
"""

import dataclasses

from deltapool.fs.classes import FileClass


@dataclasses.dataclass(slots=True)
class Total:
    files: int = 0
    bytes: int = 0


@dataclasses.dataclass(slots=True)
class JournalCounts:
    """Bytes that agents passed to write(); those that differed or were new; those read; rewrites that cost only their
    difference."""

    written: int = 0
    changed: int = 0
    read: int = 0
    folded: int = 0

    def add(self, other: "JournalCounts") -> None:
        self.written += other.written
        self.changed += other.changed
        self.read += other.read
        self.folded += other.folded


@dataclasses.dataclass(slots=True)
class Stats:
    totals: dict[FileClass, Total] = dataclasses.field(default_factory=lambda: {each: Total() for each in FileClass})
    gone: JournalCounts = dataclasses.field(default_factory=JournalCounts)  # of journals that are no more
    work_written: int = 0
    live_written: int = 0  # bytes passed to pwrite on live files, since the mount
    requests: int = 0
    handler_errors: int = 0  # unexpected exceptions, answered with EIO

    def resized(self, file_class: FileClass, difference: int) -> None:
        self.totals[file_class].bytes += difference

    def appeared(self, file_class: FileClass, size: int, files: int = 1) -> None:
        total = self.totals[file_class]
        total.files += files
        total.bytes += size

    def vanished(self, file_class: FileClass, size: int) -> None:
        total = self.totals[file_class]
        total.files -= 1
        total.bytes -= size
