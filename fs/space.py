"""Disk space: what work may use, and the reserve that it may not.

The backing disk belongs to others too. What is free is asked again after a while and after so many bytes written; in
between it is counted down. Journals and metadata may use the reserve, so that a full disk stops the big writers first.
"""

import os
import pathlib

from deltapool.fs.clock import Clock
from deltapool.fs.config import Limits
from deltapool.fs.errors import NoSpace

DISK_SHARE = 50  # the reserve is at most 1/50 of the disk


class Space:
    def __init__(self, folder: pathlib.Path, clock: Clock, limits: Limits) -> None:
        self._folder = folder
        self._clock = clock
        self._limits = limits
        self._asked_at = float("-inf")
        self._written = 0
        self.reserve = limits.reserve_bytes
        self._free = 0

    def take(self, count: int) -> None:
        """Work is about to write `count` bytes. Raises NoSpace if they would eat into the reserve."""
        self._written += count
        now = self._clock.steady()
        if now - self._asked_at > self._limits.space_check_seconds or self._written > self._limits.space_check_bytes:
            found = os.statvfs(self._folder)
            self.reserve = min(self._limits.reserve_bytes, found.f_frsize * found.f_blocks // DISK_SHARE)
            self._free = found.f_frsize * found.f_bavail
            self._asked_at, self._written = now, count
        if self._free - self._written < self.reserve:
            raise NoSpace(
                f"{self._free} bytes are free on the disk of the state folder, {self.reserve} of them are reserved"
            )

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs(self._folder)
