"""A daemon with faults: the real one, in which the n-th call of some function dies, stops, fails, waits or lies.

`FaultyMount` mounts with a list of `Fault`. This module is also the program that it starts: it wraps the functions and
then runs the command line as always. So every step that the daemon takes can be the one at which it is killed or the
power goes, and every system call the one that fails.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mounting import Mount, wait_until


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """`function` is "module:name" or "module:Class.name". It strikes at the `nth` call, before or after what the
    function does; with `armed_by`, a path, only while that exists, and then from the `nth` call on at every one."""

    function: str
    then: str  # "die", "stop", "raise" (OSError with `errno`), "fail" (an unexpected RuntimeError), "wait", "give"
    when: str = "before"
    nth: int = 1
    armed_by: str | None = None
    errno: int = 5
    seconds: float = 0.0
    value: Any = None  # what the function gives, for "give"


class FaultyMount(Mount):
    """A mount whose daemon has `faults`, unless `start` is called without any."""

    def __init__(self, path: pathlib.Path, state: pathlib.Path, config: str | None = None) -> None:
        super().__init__(path, state, config)
        self.faults: list[Fault] = []
        self._daemon: subprocess.Popen[bytes] | None = None

    def __exit__(self, *details: object) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGCONT)
        super().__exit__(*details)
        if self._daemon is not None:
            self._daemon.kill()
        self.reap()

    def start(self, *arguments: str) -> None:
        """Returns when the mount answers, or a fault that strikes that early has killed or stopped the daemon."""
        if not self.faults:
            super().start(*arguments)
            return
        self.path.mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True, mode=0o700)
        (self.state / "log").mkdir(exist_ok=True)
        if self.config is not None:
            self._config_file.write_text(self.config)
            arguments = (*arguments, "--config", str(self._config_file))
        reading, writing = os.pipe()
        spec = json.dumps([dataclasses.asdict(each) for each in self.faults])
        words = [spec, "mount", self.path, "--state", self.state, "--volume", "test", "--ready-fd", str(writing)]
        with open(self.state / "log" / "deltapool.log", "ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, __file__, *map(str, words), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                cwd="/",
                start_new_session=True,
            )
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            wait_until(lambda: select.select([pipe], [], [], 0)[0] or self.stopped, "the mount")
            said = b"" if self.stopped else pipe.read()
        assert said in (b"ready\n", b""), said

    @property
    def died(self) -> bool:
        """Whether a fault has killed it."""
        return self._daemon is not None and self._daemon.poll() == -signal.SIGKILL

    @property
    def stopped(self) -> bool:
        """Whether a fault, or somebody else, has stopped every thread of it: no system call is under way."""
        return set(thread_states(self.daemon_pid)) == {"T"}

    @property
    def daemon_pid(self) -> int:
        return self.pid if self._daemon is None else self._daemon.pid

    def reap(self) -> int | None:
        """The exit code of a daemon that has ended, or ends now."""
        if self._daemon is None:
            return None
        code = self._daemon.wait(timeout=60)
        self._daemon = None
        return code

    def kill(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self.reap()
            subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=False)
        else:
            super().kill()


def thread_states(pid: int) -> list[str]:
    """R, S, D, T, Z ... of every thread."""
    states = []
    for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
        except FileNotFoundError:
            continue  # it has just ended
    return states


class _Striker:
    """Counts the calls of one function, in whatever thread."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.calls = 0
        self.lock = threading.Lock()

    def due(self) -> bool:
        fault = self.fault
        if fault.armed_by is not None and not os.path.exists(fault.armed_by):
            return False
        with self.lock:
            self.calls += 1
            return self.calls == fault.nth or (fault.armed_by is not None and self.calls >= fault.nth)

    def strike(self) -> None:
        fault = self.fault
        match fault.then:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise OSError(fault.errno, os.strerror(fault.errno))
            case "fail":
                raise RuntimeError(f"an injected failure of {fault.function}")
            case "wait":
                time.sleep(fault.seconds)  # sleeps: this is the slow disk that a test asked for


def _wrapped(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    striker = _Striker(fault)
    early = fault.when == "before"

    @functools.wraps(function)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        strikes = striker.due()
        if strikes and early:
            striker.strike()
        result = await function(*args, **kwargs)
        if strikes and not early:
            striker.strike()
        return fault.value if strikes and fault.then == "give" else result

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        strikes = striker.due()
        if strikes and early:
            striker.strike()
        result = function(*args, **kwargs)
        if strikes and not early:
            striker.strike()
        return fault.value if strikes and fault.then == "give" else result

    return asynchronous if inspect.iscoroutinefunction(function) else synchronous


def _inject(fault: Fault) -> None:
    module, _, name = fault.function.partition(":")
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for step in path:
        holder = getattr(holder, step)
    setattr(holder, last, _wrapped(getattr(holder, last), fault))


def main() -> None:
    from deltapool.fs import cli

    for fault in json.loads(sys.argv.pop(1)):
        _inject(Fault(**fault))
    cli.main()


if __name__ == "__main__":
    main()
