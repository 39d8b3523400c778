"""What clients do to themselves never reaches another one: killed, stopped, or very many at once.

And the switches of `[fuse]`, which are there because of how clients and the kernel behave: each combination works.
"""

import contextlib
import errno
import itertools
import mmap
import os
import pathlib
import random
import signal
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from faults import Fault, FaultyMount
from mounting import wait_until
from processes import Child, Counter, Flag, errno_of, running

from deltapool.fs import control

FSYNCING_THREADS = 150
OPEN_FILES = 400
KILLS, KILLS_AT_ONCE = 200, 10
HEALTH_SECONDS = 30.0


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[FaultyMount]:
    mounted = FaultyMount(tmp_path / "mount", tmp_path / "state")
    with mounted:
        yield mounted


def busy(path: pathlib.Path, count: Counter) -> Callable[[], None]:
    """A client that is in the middle of a request nearly all of its life."""

    def work() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        for number in itertools.count():
            os.write(fd, b"%d\n" % number)
            os.stat(path)
            errno_of(lambda at=number: os.stat(f"{path} {at}"))
            os.pread(fd, 4096, 0)
            if number % 4 == 0:
                os.fsync(fd)
            count.add()

    return work


def looking(path: pathlib.Path, count: Counter) -> Callable[[], None]:
    """A client that has nothing open, so that its end is no request."""

    def work() -> None:
        for number in itertools.count():
            errno_of(lambda at=number: os.stat(f"{path} {at}"))
            count.add()

    return work


def check_health(folder: pathlib.Path, number: int) -> None:
    """Asks for something of everything, in a process of its own that may hang."""

    def work() -> None:
        path = folder / f"health{number}"
        with open(path, "wb") as file:
            file.write(b"alive")
            file.flush()
            os.fsync(file.fileno())
        assert path.read_bytes() == b"alive"
        path.rename(folder / "healthy")
        assert errno_of(lambda: os.stat(path)) == errno.ENOENT
        assert "healthy" in os.listdir(folder)

    with Child(work) as child:
        child.wait(HEALTH_SECONDS)


def test_two_hundred_clients_killed_in_the_middle_of_requests_freeze_nothing(mount: FaultyMount) -> None:
    chance = random.Random(1)
    for batch in range(KILLS // KILLS_AT_ONCE):
        counters = [Counter() for _ in range(KILLS_AT_ONCE)]
        client = looking if batch % 2 else busy
        workers = [client(mount.path / f"client{number}", count) for number, count in enumerate(counters)]
        least = chance.randrange(1, 15)
        with running(*workers) as children:
            wait_until(lambda c=counters, n=least: min(each.value for each in c) >= n, "work of all clients")
            for child in children:
                os.kill(child.pid, signal.SIGKILL)  # all at once: requests of some are queued, and vanish
            assert {child.reap() for child in children} == {signal.SIGKILL}
        control.call(mount.state, "status", HEALTH_SECONDS)  # without a request, which would end a freeze
        check_health(mount.path, batch)
    assert mount.status()["fuse"]["handler_errors"] == 0


def test_clients_that_are_stopped_block_nobody(mount: FaultyMount) -> None:
    counters = [Counter() for _ in range(20)]
    workers = [busy(mount.path / f"client{number % 5}", count) for number, count in enumerate(counters)]
    with running(*workers) as children:
        for child, count in zip(children, counters, strict=True):
            wait_until(lambda count=count: count.value > 2, "work of a client")
            os.kill(child.pid, signal.SIGSTOP)
        for child in children:
            wait_until(lambda child=child: _state(child.pid) == "T", "a stop")
        stopped = [count.value for count in counters]
        check_health(mount.path, 0)

        def work() -> None:
            for number in range(5):
                with open(mount.path / f"client{number}", "ab") as file:
                    file.write(b"another writer of the same file\n")
                    os.fsync(file.fileno())
                (mount.path / f"client{number}").rename(mount.path / f"moved{number}")

        with Child(work) as other:
            other.wait(HEALTH_SECONDS)
        assert [count.value for count in counters] == stopped
        mount_answers = mount.status()
    assert mount_answers["fuse"]["handler_errors"] == 0


def _state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_agents_may_have_more_files_open_than_the_daemon_has_descriptors(tmp_path: pathlib.Path) -> None:
    """What it closed meanwhile is opened again: with and without a name, journals, in the middle of a rewrite."""
    with FaultyMount(tmp_path / "mount", tmp_path / "state", "[limits]\nopen_live_files = 64\n") as mount:
        fds: dict[int, bytes] = {}
        for number in range(OPEN_FILES):
            path = mount.path / (f"{number}.jsonl" if number % 3 == 0 else f"{number}")
            path.write_bytes(b"%d old\n" % number)
            rewritten = os.O_TRUNC if number % 5 == 0 else 0
            fd = os.open(path, os.O_RDWR | os.O_APPEND | rewritten)
            fds[fd] = b"" if rewritten else b"%d old\n" % number
            if number % 7 == 0:
                path.unlink()
        order = list(fds) * 3
        random.Random(7).shuffle(order)
        for fd in order:
            line = b"%d more\n" % fd
            assert os.write(fd, line) == len(line)
            fds[fd] += line
            if fd % 11 == 0:
                os.fsync(fd)
            assert os.pread(fd, 1000, 0) == fds[fd]
        assert len(os.listdir(f"/proc/{mount.pid}/fd")) < OPEN_FILES
        for fd, content in fds.items():
            assert os.pread(fd, 1000, 0) == content
            assert os.fstat(fd).st_size == len(content)
            os.close(fd)
        mount.stop()
        assert mount.fsck() == []


def test_a_lookup_does_not_starve_beside_150_fsyncing_threads(tmp_path: pathlib.Path) -> None:
    """On a disk whose every sync takes 20 ms."""
    slow = Fault("os:fdatasync", "wait", seconds=0.02, armed_by=str(tmp_path))
    with FaultyMount(tmp_path / "mount", tmp_path / "state", None, slow) as mount:
        done, syncs = Flag(), Counter()
        # Made before: who makes a name holds the directory's lock in the kernel, for which lookups wait.
        fds = [os.open(mount.path / f"file{n}", os.O_RDWR | os.O_CREAT, 0o600) for n in range(FSYNCING_THREADS)]

        def fsync_all_the_time() -> None:
            lock = threading.Lock()

            def work(fd: int) -> None:
                while not done:
                    os.pwrite(fd, b"x", 0)
                    os.fsync(fd)
                    with lock:
                        syncs.add()

            threads = [threading.Thread(target=work, args=(fd,)) for fd in fds]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def look_up() -> list[float]:
            took = []
            for number in range(20):
                begin = time.perf_counter()
                assert errno_of(lambda at=number: os.stat(mount.path / f"missing{at}")) == errno.ENOENT
                took.append(time.perf_counter() - begin)
            return took

        with running(fsync_all_the_time) as (syncing,):
            wait_until(lambda: syncs.value > FSYNCING_THREADS, "fsyncs")
            before = syncs.value
            with Child(look_up) as other:
                took = other.wait(HEALTH_SECONDS)
            wait_until(lambda: syncs.value > before, "fsyncs that go on")
            done.set()
            syncing.wait()
        for fd in fds:
            os.close(fd)
        assert statistics.median(took) < 1, took
        assert max(took) < 10, took


# --- the switches of [fuse]


@pytest.mark.parametrize("poll", [True, False])
@pytest.mark.parametrize("renegotiate", [True, False])
def test_every_combination_of_poll_and_renegotiate_works_and_costs_what_it_should(
    tmp_path: pathlib.Path, poll: bool, renegotiate: bool
) -> None:
    config = f"[fuse]\npoll = {str(poll).lower()}\nrenegotiate = {str(renegotiate).lower()}\n"
    with FaultyMount(tmp_path / "mount", tmp_path / "state", config) as mount:
        path = mount.path / "journal.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, b"the first line\n")
        before = mount.status()["fuse"]["requests"]
        for number in range(10):
            os.write(fd, b"%d\n" % number)
        cost = mount.status()["fuse"]["requests"] - before
        os.close(fd)
        assert cost == (10 if renegotiate else 20)
        assert path.read_bytes() == b"the first line\n" + b"".join(b"%d\n" % number for number in range(10))
        _work_of_many_kinds(mount.path)
        mount.remount()
        assert (mount.path / "mapped").read_bytes() == b"mapped" + bytes(10_000 - 6)
        assert mount.fsck() == []


def _work_of_many_kinds(folder: pathlib.Path) -> None:
    path = folder / "mapped"
    path.write_bytes(bytes(10_000))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:6] = b"mapped"
        mapped.flush()
    assert path.read_bytes()[:6] == b"mapped"
    path.rename(folder / "renamed")
    (folder / "renamed").rename(path)
    (folder / "rewritten").write_bytes(b"long " * 1000)
    (folder / "rewritten").write_bytes(b"short")
    assert (folder / "rewritten").read_bytes() == b"short"
    (folder / "link").symlink_to("rewritten")
    assert (folder / "link").read_bytes() == b"short"
    os.chmod(folder / "rewritten", 0o4755)
    with open(folder / "rewritten", "ab") as appending:
        appending.write(b"er")
    assert (folder / "rewritten").stat().st_mode & 0o7777 == 0o755
    with contextlib.closing(sqlite3.connect(folder / "database")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t(x)")
        database.executemany("INSERT INTO t VALUES (?)", ((each,) for each in range(100)))
        database.commit()
        assert database.execute("SELECT sum(x) FROM t").fetchone() == (4950,)
