"""The composition root: puts the parts of one mount together, owns the one nursery, and takes them apart again.

Order of an end: the kernel writes back and unmounts, the loop ends, then everything that is still dirty is settled
and the namespace closed clean. Whatever ends the process earlier is a crash, and recovery knows what to do.
"""

import dataclasses
import gc
import logging
import pathlib
import resource
import signal
import socket
from collections.abc import Awaitable, Callable

import trio

from deltapool.fs import server, session, unmount
from deltapool.fs.attributes import Attributes
from deltapool.fs.clock import SystemClock
from deltapool.fs.config import Config
from deltapool.fs.counting import Count
from deltapool.fs.database import Database
from deltapool.fs.errors import FilesystemError, StateError
from deltapool.fs.files import Files
from deltapool.fs.fuse import Adapter
from deltapool.fs.inodes import Inodes
from deltapool.fs.livefile import LiveStore
from deltapool.fs.names import Names
from deltapool.fs.namespace import Namespace
from deltapool.fs.recover import Audit, recover, resume
from deltapool.fs.report import Report
from deltapool.fs.settle import Settler, Sink
from deltapool.fs.space import Space
from deltapool.fs.state import State
from deltapool.fs.stats import Stats

NR_OPEN = pathlib.Path("/proc/sys/fs/nr_open")
STOP_SECONDS = 10.0
FLUSH_ROUNDS = 10  # at the end, when nothing changes any more: more are of no use

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Parts:
    inodes: Inodes
    files: Files
    settler: Settler
    adapter: Adapter
    report: Report
    audit: Audit
    count: Count


def build(state: State, mountpoint: pathlib.Path, config: Config, sink: Sink | None) -> Parts:
    """Recovers the state folder and puts everything above it together. Nothing is mounted yet."""
    clock, stats = SystemClock(), Stats()
    store = LiveStore(state.folder, config.limits.open_live_files)
    namespace = Namespace(state.namespace, config.limits, clock.now_ns())
    recovery = recover(namespace, store)
    inodes = Inodes(namespace, store, config.rules, clock, config.limits, stats)
    stats.gone = namespace.gone()
    count = Count(state.namespace)
    files = Files(inodes, Space(state.folder, clock, config.limits))
    resume(files, recovery)
    names = Names(inodes, files)
    attributes = Attributes(inodes, files)
    settler = Settler(names, files, sink)
    audit = Audit(inodes, state.folder, recovery)
    if not recovery.clean and recovery.dirty:
        log.warning("recovered after an unclean stop: %d files were dirty, %s", len(recovery.dirty), recovery.summary())
    report = Report(state, mountpoint, settler, recovery, audit, count)
    return Parts(inodes, files, settler, Adapter(inodes, files, names, attributes), report, audit, count)


def serve(
    state: State, mountpoint: pathlib.Path, config: Config, ready: Callable[[], None], sink: Sink | None = None
) -> None:
    """Mounts, calls `ready` when requests are answered, and returns when the filesystem is unmounted and everything
    is durable.

    Raises StateError if the mount cannot be made or could not be closed cleanly."""
    _raise_descriptor_limit()
    parts = build(state, mountpoint, config, sink)
    listener = server.listen(state.folder)
    try:
        session.attach(parts.adapter, mountpoint, state.mount_source, poll=config.poll, renegotiate=config.renegotiate)
    except RuntimeError as error:
        listener.close()
        _close(parts)
        raise StateError(f"{mountpoint} could not be mounted: {error}") from None
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        trio.run(_main, parts, listener, mountpoint, config, ready)
    finally:
        session.detach()
        listener.close()
        (state.folder / "control.sock").unlink(missing_ok=True)
        _close(parts)
    if parts.inodes.database.failure is not None:
        raise StateError(f"the volume was closed after a failure: {parts.inodes.database.failure}")


async def _main(
    parts: Parts, listener: socket.socket, mountpoint: pathlib.Path, config: Config, ready: Callable[[], None]
) -> None:
    limits, settler = config.limits, parts.settler
    trio.to_thread.current_default_thread_limiter().total_tokens = limits.threads
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_commit, nursery, parts.inodes.database)
        nursery.start_soon(_repeat, limits.note_seconds, settler.note)
        nursery.start_soon(_repeat, limits.settle_seconds, settler.settle)
        nursery.start_soon(_hurry, settler)
        nursery.start_soon(_repeat, limits.reap_seconds, settler.reap)
        nursery.start_soon(parts.audit.run)
        nursery.start_soon(parts.count.run, parts.inodes.stats)
        handlers: dict[str, server.Handler] = {
            "status": parts.report.status,
            "journals": parts.report.journals,
            "flush": parts.report.flush,
        }
        nursery.start_soon(server.serve, listener, handlers, limits.control_request_bytes)
        nursery.start_soon(_stop_on_signal, mountpoint)
        nursery.start_soon(_tell_ready, ready)
        await session.serve()
        nursery.cancel_scope.cancel()
    await _end(parts)


async def _end(parts: Parts) -> None:
    """Everything becomes durable and clean, if that is possible; the next mount recovers what is not."""
    database, settler = parts.inodes.database, parts.settler
    for _ in range(FLUSH_ROUNDS):
        if database.failure is None and parts.inodes.dirty.keys() - settler.missing:
            await settler.flush()
    await settler.reap()
    if database.failure is not None:
        return
    if parts.inodes.dirty.keys() - settler.missing or not database.has_room(frees=True):
        log.error("the disk is full: %d files are durable, but not noted as such", len(parts.inodes.dirty))
        return
    parts.inodes.namespace.set_meta("clean", 1)
    database.commit()
    await database.durable(database.committed)


async def _commit(nursery: trio.Nursery, database: Database) -> None:
    """Commits the open transaction a moment after it was opened, and keeps the log short."""
    while True:
        await database.wake.wait()
        database.wake = trio.Event()
        await trio.sleep(database.limits.commit_delay_seconds)
        try:
            database.commit()
        except FilesystemError as error:
            log.error("%s", error)
            return
        if database.wants_checkpoint:
            nursery.start_soon(database.checkpoint)


async def _repeat(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await trio.sleep(seconds)
        await _attempt(work)


async def _hurry(settler: Settler) -> None:
    while True:
        await settler.hurry.wait()
        await _attempt(settler.replace)


async def _attempt(work: Callable[[], Awaitable[None]]) -> None:
    """Background work that fails is told in the log and tried again; what must not go on has poisoned the mount."""
    try:
        await work()
    except Exception:
        log.exception("background work failed")
        await trio.sleep(1)


async def _stop_on_signal(mountpoint: pathlib.Path) -> None:
    """SIGTERM and SIGINT unmount. A busy mount is detached and served until its users let go, for a bounded time."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            await trio.to_thread.run_sync(unmount.detach_for_stop, mountpoint)
            await trio.sleep(STOP_SECONDS)
            log.error("users of %s did not let go within %g s", mountpoint, STOP_SECONDS)
            session.stop()


async def _tell_ready(ready: Callable[[], None]) -> None:
    ready()


def _close(parts: Parts) -> None:
    parts.inodes.database.close()


def _raise_descriptor_limit() -> None:
    """A descriptor for each file that agents have open, as far as this user may have so many (see `LiveStore`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(NR_OPEN.read_text())
    for limit in (most, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, hard)))
            return
        except (ValueError, OSError):
            continue  # only root may go beyond the hard limit
