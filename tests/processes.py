"""Other processes of a test: forked children that run a function, and what became of it.

Forked, not spawned: a test's closure is the program, and there is no interpreter to start. A child never returns into
pytest: it ends with what it sent home. Whatever still runs when the block ends is killed.
"""

import contextlib
import mmap
import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 3600.0  # pytest's own limit for a test is the shorter one


class Child:
    """A running function in a process of its own. `uid` is who it runs as, without groups; it works in `cwd`."""

    def __init__(self, function: Callable[[], Any], cwd: str | os.PathLike[str] | None = None, uid: int | None = None):
        self._pipe, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of other tests hold nothing
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _live(function, writing, cwd, uid)
        os.close(writing)
        self._ended = False

    def wait(self, seconds: float = SECONDS) -> Any:
        """What the function gave. Fails the test with the child's traceback if it raised or was killed."""
        deadline, said = time.monotonic() + seconds, b""
        while select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self._pipe, 1 << 16)
            if not data:
                break
            said += data
        else:
            raise AssertionError(f"child {self.pid} did not end within {seconds:g} s")
        status = self.reap()
        if not said:
            raise AssertionError(f"child {self.pid} ended with wait status {status} and said nothing")
        done, value = pickle.loads(said)
        if not done:
            raise AssertionError(f"child {self.pid}:\n{value}")
        return value

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Ends it; the wait status."""
        os.kill(self.pid, number)
        return self.reap()

    def reap(self) -> int:
        assert not self._ended
        _, status = os.waitpid(self.pid, 0)
        self._ended = True
        os.close(self._pipe)
        return status

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.kill()


def _live(function: Callable[[], Any], writing: int, cwd: str | os.PathLike[str] | None, uid: int | None) -> None:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            if cwd is not None:
                os.chdir(cwd)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = pickle.dumps((True, function()))
        except BaseException:  # noqa: BLE001 - whatever it is, the test shall hear of it
            answer = pickle.dumps((False, traceback.format_exc()))
        view = memoryview(answer)
        while view:
            view = view[os.write(writing, view) :]
    finally:
        os._exit(0)


@contextlib.contextmanager
def running(*functions: Callable[[], Any], cwd: str | os.PathLike[str] | None = None) -> Iterator[list[Child]]:
    """All of them at once, in the block."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Child(function, cwd)) for function in functions]


def together(*functions: Callable[[], Any], cwd: str | os.PathLike[str] | None = None) -> list[Any]:
    """All of them at once; what each gave."""
    with running(*functions, cwd=cwd) as children:
        return [child.wait() for child in children]


def as_user(uid: int, function: Callable[[], Any], cwd: str | os.PathLike[str]) -> Any:
    """What `function` gives when another user runs it in `cwd`, which need not be reachable for that user."""
    with Child(function, cwd, uid) as child:
        return child.wait()


class Flag:
    """A bit that a test and its children share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def __bool__(self) -> bool:
        return self._memory[0] == 1


def errno_of(function: Callable[[], Any]) -> int:
    """The errno with which it fails, 0 if it does not."""
    try:
        function()
    except OSError as error:
        return error.errno or 0
    return 0


class Counter:
    """A number that one process counts up and others look at."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def add(self, count: int = 1) -> None:
        self._memory[:] = (self.value + count).to_bytes(8, "little")

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:], "little")
