"""The mover: the process that reads pinned contents, cuts and compresses them, and keeps the pool.

Started by the fs process with one end of a socket pair, it answers one question at a time (`messages`) and ends when
the line closes, or when the process that started it does. It reads live files and the undo log, never the mount; of the
namespace it reads recipes. A content that cannot be stored is answered with the reason, and blocks no other.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import sys

import apsw

from deltapool.cas import messages, sealing, sweep
from deltapool.cas.chunking import Piece, rechunk
from deltapool.cas.contents import PinnedContent, UndoLog
from deltapool.cas.index import PoolError
from deltapool.cas.pool import Pool
from deltapool.cas.recipe import Chunk, DamagedRecipe, Entry, Hole, Recipe, encode, replaced
from deltapool.cas.recipes import Recipes

NICE = 5
PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 20


class Mover:
    """The work of the process, without its line."""

    def __init__(self, state: pathlib.Path) -> None:
        self.state = state
        self.pool = Pool(state / "pool")
        self.log = UndoLog(state / "undo")
        self._namespace = apsw.Connection(str(state / "namespace.db"), flags=apsw.SQLITE_OPEN_READONLY)
        self._namespace.set_busy_timeout(5_000)
        self.recipes = Recipes(self._namespace)

    def answer(self, request: messages.Request) -> messages.Answer:
        match request:
            case messages.Hello(version):
                if version != messages.VERSION:
                    return messages.Refused(f"this mover speaks version {messages.VERSION}, not {version}")
                return messages.Welcome(messages.VERSION, os.getpid())
            case messages.Store(jobs):
                return self.store(jobs)
            case messages.Sweep():
                return self.sweep()
            case messages.Figures():
                return messages.Counted(*self.pool.index.figures())

    def store(self, jobs: list[messages.Job]) -> messages.Answer:
        try:
            results = [self._store(job) for job in jobs]
            self.pool.flush()
        except (OSError, apsw.Error) as error:  # of the pool: nothing of this batch is certain to be durable
            self.pool.undo()
            return messages.Stored([messages.Result(job.ino, error=f"the pool: {error}") for job in jobs])
        return messages.Stored(results)

    def _store(self, job: messages.Job) -> messages.Result:
        try:
            content = PinnedContent(self.state, job, self.log)
        except FileNotFoundError:
            return messages.Result(job.ino, error="its live file is gone")
        except OSError as error:
            return messages.Result(job.ino, error=str(error))
        with contextlib.closing(content):
            base = self._base(job)
            try:
                pieces = self._pieces(job, base, content)
            except (EOFError, FileNotFoundError) as error:
                return messages.Result(job.ino, error=str(error))
        recipe, new = pieces
        if recipe == base:
            return messages.Result(job.ino, same=True)
        return messages.Result(job.ino, recipe=encode(recipe), bytes_new=new)

    def _base(self, job: messages.Job) -> Recipe | None:
        if job.base is None:
            return None
        try:
            return self.recipes.load(job.base)
        except DamagedRecipe:
            return None  # then all of it is read

    def _pieces(self, job: messages.Job, base: Recipe | None, content: PinnedContent) -> tuple[Recipe, int]:
        whole = base is None or job.dirty is None
        dirty = [(0, job.length)] if whole else job.dirty or []
        if job.seal:
            dirty_from = min((start for start, _ in dirty), default=job.length)
            pieces = sealing.sealed(base, job.length, dirty_from, content.read)
        else:
            pieces = rechunk(base, job.length, dirty, content.read, content.next_data)
        entries: list[Entry] = []
        fresh: dict[int, Piece] = {}
        size = 0
        for piece in pieces:
            _append(entries, piece.entry)
            if piece.data is not None and isinstance(piece.entry, Chunk) and not self.pool.has(piece.entry.digest):
                if base is None or len(piece.data) > sealing.HEAD_BYTES * 4:
                    size += self.pool.add(piece.entry.digest, piece.data)
                else:
                    fresh[len(entries) - 1] = piece
        recipe = Recipe(tuple(entries))
        near = {at: chunk.digest for at, chunk in replaced(base, recipe)} if base is not None and fresh else {}
        for at, piece in fresh.items():
            assert piece.data is not None
            assert isinstance(piece.entry, Chunk)
            size += self.pool.add(piece.entry.digest, piece.data, near.get(at))
        return recipe, size

    def sweep(self) -> messages.Answer:
        self._namespace.execute("BEGIN")
        try:
            present, past = self.recipes.present(), list[Recipe]()
            current = list[Recipe]()
            for number, recipe in self.recipes.all():
                (current if number in present else past).append(recipe)
            swept = sweep.sweep(self.pool, current, past)
        except DamagedRecipe as error:
            return messages.Refused(f"nothing is swept: {error}")
        except (OSError, apsw.Error) as error:
            self.pool.undo()
            return messages.Refused(f"the pool: {error}")
        finally:
            self._namespace.execute("COMMIT")
        return messages.Swept(swept.bytes_freed, swept.history_bytes)


def _append(entries: list[Entry], entry: Entry) -> None:
    """Two holes in a row are one."""
    if isinstance(entry, Hole) and entries and isinstance(entries[-1], Hole):
        entries[-1] = Hole(entries[-1].length + entry.length)
    else:
        entries.append(entry)


def serve(mover: Mover, line: socket.socket) -> None:
    """Answers until the other end closes."""
    data = bytearray()
    while True:
        size = messages.frame_size(data)
        if size is not None and len(data) >= size:
            request = messages.request(bytes(data[:size]))
            del data[:size]
            line.sendall(messages.frame(mover.answer(request)))
            continue
        more = line.recv(RECEIVE_BYTES)
        if not more:
            return
        data += more


def main() -> None:
    parser = argparse.ArgumentParser(prog="deltapool.cas.mover", description="Started by deltapool itself.")
    parser.add_argument("--state", type=pathlib.Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent:
        sys.exit(1)
    os.nice(NICE)
    with socket.socket(fileno=arguments.fd) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            mover = Mover(arguments.state)
        except (PoolError, OSError, apsw.Error) as error:
            print(f"the mover cannot start: {error}", file=sys.stderr)
            sys.exit(1)
        serve(mover, line)


if __name__ == "__main__":
    main()
