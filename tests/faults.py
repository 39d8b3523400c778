"""A daemon with faults: the real one, in which the n-th call of some function dies, stops, fails, waits or lies.

`FaultyMount` mounts with some `Fault`s. This module is also the program that it starts: it wraps the functions and then
serves as always. So every step that the daemon takes can be the one at which it is killed or the
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

import trio
from mounting import Mount, is_mounted, wait_until

from deltapool.fs import control, fsck, unmount


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
    """A mount whose daemon has `faults`. It is started, asked and unmounted without the command line, which is faster.

    `boot`, if given, is what the daemon takes for the id of this boot of the machine."""

    def __init__(self, path: pathlib.Path, state: pathlib.Path, config: str | None = None, *faults: Fault) -> None:
        super().__init__(path, state, config)
        self.faults = faults
        self.boot: str | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        """Returns when the mount answers, or a fault that strikes that early has killed or stopped the daemon."""
        assert not arguments
        for folder in (self.path, self.state, self.state / "log"):
            folder.mkdir(exist_ok=True, mode=0o700)
        request = {"mountpoint": str(self.path), "folder": str(self.state), "volume": "test", "config": None}
        if self.config is not None:
            self._config_file.write_text(self.config)
            request["config"] = str(self._config_file)
        reading, writing = os.pipe()
        faults = [dataclasses.asdict(each) for each in self.faults]
        told = {"request": request, "boot": self.boot, "ready_fd": writing, "faults": faults}
        with open(self.state / "log" / "deltapool.log", "ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, __file__, json.dumps(told)],
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
        if said != b"ready\n" and not self.stopped and self.reap() != -signal.SIGKILL:
            raise AssertionError(f"{said.decode()}\n{self.log()}")

    def stop(self) -> None:
        """A clean unmount; fails the test unless it is one."""
        code = self.unmount()
        assert code == 0, f"exit {code}\n{self.log()}"

    def unmount(self) -> int:
        """Unmounts. The exit code of the daemon, negative if a fault has killed it."""
        mounted = unmount.mounted_at(self.path)
        assert mounted is not None
        unmount.unmount(mounted, force=False)
        return self.reap()

    def kill(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self.reap()
        subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=False)

    def clear(self) -> None:
        self.kill()
        while is_mounted(self.path):
            subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=True)

    def reap(self) -> int:
        """The exit code of the daemon, which has ended or is about to."""
        assert self._daemon is not None
        code = self._daemon.wait(timeout=60)
        self._daemon = None
        return code

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = control.call(self.state, "status", 60)
        return answer

    def fsck(self) -> list[dict[str, Any]]:
        return [finding.as_dict() for finding in fsck.check(self.state).findings]

    @property
    def pid(self) -> int:
        assert self._daemon is not None
        return self._daemon.pid

    @property
    def ended(self) -> bool:
        """Whether it has, or a fault has killed it."""
        return self._daemon is None or self._daemon.poll() is not None

    @property
    def stopped(self) -> bool:
        """Whether a fault, or somebody else, has stopped every thread of it: no system call is under way."""
        return not self.ended and set(thread_states(self.pid)) == {"T"}


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
                time.sleep(fault.seconds)  # sleeps: this is the slow disk that a test asked for, in a thread


def _wrapped(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    striker = _Striker(fault)
    early = fault.when == "before"

    @functools.wraps(function)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        strikes = striker.due()
        if strikes and fault.then == "wait":
            await trio.sleep(fault.seconds)
        elif strikes and early:
            striker.strike()
        result = await function(*args, **kwargs)
        if strikes and not early and fault.then != "wait":
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
    from deltapool.fs import launch, recover

    told = json.loads(sys.argv[1])
    for fault in told["faults"]:
        _inject(Fault(**fault))
    if told["boot"] is not None:
        recover.BOOT_ID = pathlib.Path(told["boot"])
    request = told["request"]
    mountpoint, folder = pathlib.Path(request["mountpoint"]), pathlib.Path(request["folder"])
    config = pathlib.Path(request["config"]) if request["config"] else None
    launch.in_foreground(launch.Request(mountpoint, folder, request["volume"], config), told["ready_fd"])


if __name__ == "__main__":
    main()
