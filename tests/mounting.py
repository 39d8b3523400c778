"""A mounted volume for tests: the real command, the real FUSE, a state folder of its own; and an end of it, whatever
happened."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from deltapool.fs import state

COMMAND = [sys.executable, "-m", "deltapool.fs.cli"]
RESCUE = pathlib.Path(__file__).parent.parent / "scripts" / "rescue"
END_SECONDS = 60.0


def deltapool(
    *arguments: str | os.PathLike[str], check: bool = True, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs the command. With `check`, a non-zero exit fails the test with what it said."""
    done = subprocess.run(
        [*COMMAND, *map(os.fspath, arguments)], capture_output=True, text=True, timeout=timeout, cwd="/"
    )
    if check and done.returncode:
        raise AssertionError(
            f"deltapool {' '.join(map(str, arguments))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


class Mount:
    """`path` is the mounted directory, `state` its state folder."""

    def __init__(self, path: pathlib.Path, state: pathlib.Path, config: str | None = None) -> None:
        self.path = path
        self.state = state
        self.config = config
        self._config_file = state.parent / f"{state.name}.toml"

    def __enter__(self) -> "Mount":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def pid(self) -> int:
        """Of the daemon that serves. What a killed one has left in the file may be anybody's number by now."""
        pid = state.holder(self.state)
        assert pid, "nothing is mounted"
        return pid

    def start(self, *arguments: str) -> None:
        if self.config is not None:
            self._config_file.write_text(self.config)
            arguments = (*arguments, "--config", str(self._config_file))
        deltapool("mount", self.path, "--state", self.state, "--volume", "test", *arguments)

    def stop(self) -> None:
        """A clean unmount."""
        deltapool("umount", self.path)

    def remount(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """kill -9 of the daemon, and the dead mount cleared."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=False)

    def crash(self) -> None:
        """kill -9, then mounted again."""
        self.kill()
        self.start()

    def clear(self) -> None:
        """Nothing of it is left: for the end of a test, also of one that failed."""
        with contextlib.suppress(Exception):
            if is_mounted(self.path) and deltapool("umount", self.path, check=False).returncode == 0:
                return
        with contextlib.suppress(Exception):
            self.kill()
        while is_mounted(self.path):
            subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=True)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(deltapool("status", self.path, "--json").stdout)
        return answer

    def journals(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = json.loads(deltapool("journals", self.path, "--json").stdout)["journals"]
        return answer

    def fsck(self) -> list[dict[str, Any]]:
        """What fsck finds wrong, mounted or not."""
        done = deltapool("fsck", "--state", self.state, "--json", check=False)
        assert done.returncode in (0, 1), done.stderr
        wrong: list[dict[str, Any]] = json.loads(done.stdout)["wrong"]
        assert bool(wrong) == bool(done.returncode)
        return wrong

    def rescue(self, destination: pathlib.Path) -> None:
        """scripts/rescue, with a Python that knows nothing of deltapool."""
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(RESCUE), str(self.state), str(destination)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def log(self) -> str:
        return (self.state / "log" / "deltapool.log").read_text()


def is_mounted(path: pathlib.Path) -> bool:
    lines = pathlib.Path("/proc/self/mounts").read_bytes().splitlines()  # others' mounts may have any name
    return any(line.split(b" ")[1] == os.fsencode(path) for line in lines)


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), f"the end of pid {pid}")


def wait_until(holds: Any, what: str, seconds: float = END_SECONDS) -> None:
    """Waits for something that happens in another process. Polls, since there is nothing to wait on."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.01)  # sleeps: for another process, which no clock of ours moves


def run(
    arguments: Sequence[str | os.PathLike[str]],
    cwd: pathlib.Path | None = None,
    timeout: float = 300,
    **environment: str,
) -> str:
    """Runs a program that must succeed, and gives its stdout."""
    done = subprocess.run(
        list(map(os.fspath, arguments)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
