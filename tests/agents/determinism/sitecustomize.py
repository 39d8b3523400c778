"""Makes one run of gptme a function of its prompts: Python imports this before anything else (PYTHONPATH).

Journals hold times, and nothing else that differs between two runs. So the clock is a counter: `datetime.now` and
`time.time` start at AGENT_CLOCK (seconds since 1970) and each `datetime.now` of the main thread moves it by a
millisecond; no other thread, and no `time.time`, moves it, since how often these are called depends on how fast the
machine is. Monotonic clocks and sleeping stay real, so time-outs work; but for the one module that writes how long a
tool took into the journal, no time passes.

With AGENT_WITNESS=<file>, it also counts what gptme really changes in journals, to compare with what the filesystem
says: for each `*.jsonl` that was closed after writing, or replaced by a rename, the bytes from the first that differs
from the generation before. One line of JSON each: path, size, bytes changed.
"""

from __future__ import annotations

import builtins
import datetime as datetime_module
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

AnyFunction: TypeAlias = Callable[..., Any]

RealDatetime = datetime_module.datetime
MAIN = threading.main_thread()
TICK_SECONDS = 0.001
TIMES_ITS_TOOLS = "gptme.tools"


class Clock:
    def __init__(self, start: float) -> None:
        self.start = start
        self.ticks = 0

    def now(self) -> float:
        return self.start + self.ticks * TICK_SECONDS

    def tick(self) -> float:
        if threading.current_thread() is MAIN:
            self.ticks += 1
        return self.now()


def stop_the_clock(start: float) -> None:
    clock = Clock(start)

    class Meta(type):
        """A real datetime, made in C, is an instance of the replacement as well."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, RealDatetime)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, RealDatetime)

    class Datetime(RealDatetime, metaclass=Meta):
        @classmethod
        def now(cls, tz: datetime_module.tzinfo | None = None) -> Datetime:
            return cls.fromtimestamp(clock.tick(), tz)

        @classmethod
        def utcnow(cls) -> Datetime:
            return cls.fromtimestamp(clock.tick(), datetime_module.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Datetime:
            return cls.now()

    Datetime.__name__ = Datetime.__qualname__ = "datetime"
    Datetime.__module__ = "datetime"
    datetime_module.datetime = Datetime  # type: ignore[misc]
    time.time = clock.now
    real_monotonic = time.monotonic
    time.monotonic = lambda: 0.0 if caller() == TIMES_ITS_TOOLS else real_monotonic()


def caller() -> str:
    """The module whose function called the function that asks."""
    return str(sys._getframe(2).f_globals.get("__name__"))


class Witness:
    """Compares generations of journals as whole files, at the moment that Python finishes one."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.known: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.open: AnyFunction = builtins.open

    def before(self, path: str) -> None:
        """Remember what a journal holds when this process first touches it."""
        with self.lock:
            if path not in self.known:
                self.known[path] = self._content(path)

    def after(self, path: str) -> None:
        with self.lock:
            old, new = self.known.get(path, b""), self._content(path)
            self.known[path] = new
            line = {"path": path, "size": len(new), "changed": len(new) - common(old, new)}
            with self.open(self.report, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _content(self, path: str) -> bytes:
        try:
            with self.open(path, "rb") as file:
                content: bytes = file.read()
                return content
        except FileNotFoundError:
            return b""

    def install(self) -> None:
        real_open, real_replace = builtins.open, os.replace

        def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
            watched = str(path).endswith(".jsonl") and set(mode) & set("wax+")
            if not watched:
                return real_open(file, mode, *args, **kwargs)
            path = os.path.realpath(str(path))
            self.before(path)
            opened: Any = real_open(file, mode, *args, **kwargs)
            close = opened.close

            def watched_close() -> None:
                was_open = not opened.closed
                close()
                if was_open:
                    self.after(path)

            opened.close = watched_close  # a file has a __dict__, and leaving `with` looks there first
            return opened

        def watched_replace(source: Any, target: Any, **kwargs: Any) -> None:
            path = os.path.realpath(str(target))
            if not path.endswith(".jsonl"):
                real_replace(source, target, **kwargs)
                return
            self.before(path)
            real_replace(source, target, **kwargs)
            self.after(path)

        for module, name, function in (
            (builtins, "open", watched_open),
            (io, "open", watched_open),
            (os, "replace", watched_replace),
            (os, "rename", watched_replace),
        ):
            setattr(module, name, function)


def common(old: bytes, new: bytes) -> int:
    """The length of the longest common prefix."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[:middle] == new[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


if "AGENT_CLOCK" in os.environ:
    stop_the_clock(float(os.environ["AGENT_CLOCK"]))
if "AGENT_WITNESS" in os.environ:
    Witness(Path(os.environ["AGENT_WITNESS"])).install()
