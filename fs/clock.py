"""Time as an argument: the wall clock for timestamps, a steady one for delays. Tests bring their own."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds since the epoch, for timestamps only."""

    def steady(self) -> float:
        """Seconds that never run backwards."""


class SystemClock:
    def now_ns(self) -> int:
        return time.time_ns()

    def steady(self) -> float:
        return time.monotonic()
