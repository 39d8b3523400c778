"""What a running mount says of itself: the answers to `status`, `journals` and `flush`. It reads; `flush` lets the
settler work."""

import os
import pathlib
from typing import Any

import trio

from deltapool.fs.counting import Count
from deltapool.fs.errors import NotFound, UserError
from deltapool.fs.inodes import join
from deltapool.fs.recover import Audit, Recovery
from deltapool.fs.settle import Settler
from deltapool.fs.state import State
from deltapool.fs.stats import JournalCounts

FLUSH_ROUNDS = 10
TURN_JOURNALS = 64  # agents get a turn after so many


class Report:
    def __init__(
        self,
        state: State,
        mountpoint: pathlib.Path,
        settler: Settler,
        recovery: Recovery,
        audit: Audit,
        count: Count,
    ) -> None:
        self.state = state
        self.mountpoint = mountpoint
        self.settler = settler
        self.inodes = settler.inodes
        self.recovery = recovery
        self.audit = audit
        self.count = count

    async def status(self, _request: dict[str, Any]) -> dict[str, Any]:
        await self.count.done.wait()
        stats, database = self.inodes.stats, self.inodes.database
        classes = {each.label: {"files": total.files, "bytes": total.bytes} for each, total in stats.totals.items()}
        counts = self._all_counts()
        dirty = [inode for inode in self.inodes.dirty.values() if inode.is_file]
        journal = classes["journal"]
        return {
            "volume": self.state.volume.name,
            "volume_id": self.state.volume.id,
            "mountpoint": str(self.mountpoint),
            "state": str(self.state.folder),
            "remote": "none",
            "pids": {"fs": os.getpid()},
            "read_only": database.failure,
            "journals": {
                "count": journal["files"],
                "bytes": journal["bytes"],
                "bytes_written": counts.written,
                "bytes_changed": counts.changed,
                "bytes_read": counts.read,
                "rewrites_folded": counts.folded,
            },
            "work": {**classes["work"], "bytes_written": stats.work_written},
            "cache": classes["cache"],
            "host": classes["host"],
            "dirty": {"files": len(dirty), "bytes": sum(inode.size for inode in dirty)},
            "live": {"bytes_pwritten": stats.live_written},
            "namespace": {"bytes_logged": database.wal_bytes_written},
            "fuse": {"requests": stats.requests, "handler_errors": stats.handler_errors},
            "recovery": {
                "clean": self.recovery.clean,
                "dirty": len(self.recovery.dirty),
                "rewrites_undone": len(self.recovery.restored),
                "journals_trimmed": len(self.recovery.trimmed),
                "bytes_missing": len(self.recovery.missing),
            },
            "audit": {
                "done": self.audit.done,
                "changed_outside": len(self.audit.changed),
                "lost_and_found": len(self.audit.lost),
            },
        }

    def _all_counts(self) -> JournalCounts:
        total = JournalCounts()
        total.add(self.inodes.stats.gone)
        for ino, note in self.inodes.namespace.journals():
            inode = self.inodes.cached(ino)
            if inode is None or inode.journal is None:
                total.add(JournalCounts(note.written, note.changed, note.read, note.folded))
        for inode in self.inodes.with_journal():
            if inode.journal is not None and inode.nlink:
                total.add(inode.journal.counts)
        return total

    async def journals(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Every journal without opening it. Notes first what changed, so that the counts are those of now."""
        await self.settler.note()
        listed = []
        for number, (ino, noted) in enumerate(self.inodes.namespace.journals()):
            if number % TURN_JOURNALS == 0:
                await trio.lowlevel.checkpoint()
            try:
                inode = self.inodes.get(ino)
            except NotFound:
                continue
            note = inode.journal.note if inode.journal is not None else noted
            name = self.inodes.namespace.first_name(ino)
            if name is None:
                continue
            try:
                path = join(self.inodes.path(name.parent), name.name)
            except NotFound:
                continue
            listed.append(
                {
                    "path": os.fsdecode(path),
                    "inode": ino,
                    "bytes": inode.size,
                    "lines": note.lines,
                    "last_append_ns": inode.mtime_ns,
                    "bytes_written": note.written,
                    "bytes_changed": note.changed,
                    "bytes_read": note.read,
                }
            )
        return {"journals": sorted(listed, key=lambda each: str(each["path"]))}

    async def flush(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Everything that was written so far becomes durable and clean."""
        for _ in range(FLUSH_ROUNDS):
            await self.settler.flush()
            if self.inodes.database.failure is not None:
                raise UserError(f"the mount is read-only: {self.inodes.database.failure}")
            if not self.inodes.dirty:
                break
        self.inodes.database.commit()  # names alone leave nothing dirty
        await self.inodes.database.durable(self.inodes.database.committed)
        return {"dirty": len(self.inodes.dirty)}
