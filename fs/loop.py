"""How the FUSE loop waits: polling the device briefly after an answer, and never stuck in a read for a client that
was killed.

pyfuse3 waits for requests in `_wait_fuse_readable`, which is replaced here. Nearly all of a small request's time is
sleeping and being woken; looking again for 50 us first more than halves it. Trio gets a turn at least every
millisecond, and there is no polling while a sync runs in a thread, which the poller would only slow down.

The session's descriptor is blocking. A request whose client was SIGKILLed while it was queued vanishes between poll
and read, and the read then blocks the whole process, interpreter lock held. An interval timer, armed after each wait
for I/O and disarmed before the next, interrupts it; pyfuse3 tries again after EINTR.

If anything that this relies on is not there, `install` changes nothing and says so: pyfuse3's own waiting is slower,
but right.
"""

import logging
import os
import select
import signal
import time

import pyfuse3
import trio

SLOW_PATH = "_wait_fuse_readable"  # private to pyfuse3, so not in its types
SPIN_SECONDS = 50e-6
TURN_SECONDS = 1e-3
GUARD_SECONDS = 0.05

log = logging.getLogger(__name__)


def device_descriptor() -> int | None:
    """The session's /dev/fuse among our descriptors."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
        except OSError:
            continue
    return None


class Guard(trio.abc.Instrument):
    """Arms the timer while handlers run, remembers when trio last had its turn, and counts the threads that are being
    waited for."""

    def __init__(self) -> None:
        self.last_turn = 0.0

    def before_io_wait(self, timeout: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def after_io_wait(self, timeout: float) -> None:
        self.last_turn = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, GUARD_SECONDS, GUARD_SECONDS)


def threads_running() -> int:
    """Threads that something on the loop waits for."""
    return int(trio.to_thread.current_default_thread_limiter().borrowed_tokens)


def install(*, poll: bool) -> bool:
    """Replaces pyfuse3's waiting; without `poll` it is guarded only. After `pyfuse3.init`, before `pyfuse3.main`, in
    the main thread. False: nothing was changed."""
    device = device_descriptor()
    slow_path = getattr(pyfuse3, SLOW_PATH, None)
    if device is None or slow_path is None:
        log.warning("this pyfuse3 cannot be polled or guarded: requests take longer")
        return False
    signal.signal(signal.SIGALRM, lambda *_: None)
    ready = select.poll()
    ready.register(device, select.POLLIN)
    guard = Guard()
    installed = False

    async def wait() -> bool:
        nonlocal installed
        if not installed:
            trio.lowlevel.add_instrument(guard)
            installed = True
        now = time.perf_counter()
        end = min(now + SPIN_SECONDS, guard.last_turn + TURN_SECONDS)
        if poll and not threads_running():
            while now < end:
                if ready.poll(0):
                    return True
                now = time.perf_counter()
        while True:  # pyfuse3's own waiting keeps its count of readers
            if not await slow_path():
                return False
            if ready.poll(0):
                return True

    setattr(pyfuse3, SLOW_PATH, wait)
    return True


def uninstall() -> None:
    """After `pyfuse3.main`: no timer outlives the loop."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
