"""Time as an argument: the wall clock for timestamps, a steady one for delays. Tests bring their own.

Timestamps are those of the kernel's tick, a few milliseconds coarse, as on other filesystems. The kernel itself takes
them for `touch`: by a finer clock of ours a file would be older after a touch than after the write before it.
"""

import time
from typing import Protocol

CLOCK_REALTIME_COARSE = 5  # of linux/time.h; Python has no name for it
TICK_NS_MAX = 20_000_000


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds since the epoch, for timestamps only."""

    def seen(self, now_ns: int) -> None:
        """A file was given this timestamp, maybe by the kernel, whose tick may be a little ahead of ours: what comes
        next is not earlier."""

    def steady(self) -> float:
        """Seconds that never run backwards."""


class SystemClock:
    def __init__(self) -> None:
        self._latest = 0

    def now_ns(self) -> int:
        now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
        return self._latest if 0 < self._latest - now < TICK_NS_MAX else now

    def seen(self, now_ns: int) -> None:
        if self._latest < now_ns <= time.time_ns():
            self._latest = now_ns

    def steady(self) -> float:
        return time.monotonic()
