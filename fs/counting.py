"""The totals by class, counted beside the mount: a scan of every row takes seconds where there are a million.

What is counted is the namespace as it was before the first request, in a read transaction that is opened then. What
happens meanwhile is added up by `stats` as ever, from zero; the two meet when the scan is done.
"""

import pathlib

import apsw
import trio

from deltapool.fs.classes import FileClass
from deltapool.fs.database import open_connection
from deltapool.fs.stats import Stats

TOTALS = "SELECT class, count(*), sum(size) FROM inode WHERE mode & 61440 = 32768 GROUP BY class"


class Count:
    def __init__(self, path: pathlib.Path) -> None:
        """Before the first request: from here on nothing that is committed is counted."""
        self.done = trio.Event()
        self._connection = open_connection(path, read_only=True)
        self._connection.execute("BEGIN; SELECT 1 FROM meta").fetchall()

    async def run(self, stats: Stats) -> None:
        try:
            rows = await trio.to_thread.run_sync(self._scan, abandon_on_cancel=True)
        except trio.Cancelled:
            self._connection.interrupt()  # the thread ends by itself
            raise
        for number, files, size in rows:
            stats.appeared(FileClass(number), size, files)
        self.done.set()

    def _scan(self) -> list[tuple[int, int, int]]:
        try:
            return list(self._connection.execute(TOTALS))
        except apsw.InterruptError:
            return []
        finally:
            self._connection.close()
