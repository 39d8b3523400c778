"""A mount that writes down its deltas, and what can be made of them.

Run as a program, this is the fs process of `deltapool mount`, with a sink: the deltas of every note that counts are
appended to a file, as records. `Replica` makes journals from them, as another host would.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

from mounting import Mount

from deltapool.fs import config, control, launch, mount, state
from deltapool.fs.delta import NEED_MORE, Decoder, Delta, encode
from deltapool.fs.replay import MemoryContent, apply

FLUSH_SECONDS = 60.0


class Replica:
    """What a reader of the deltas knows: the content of every journal, by inode, each proved by its digest."""

    def __init__(self) -> None:
        self.contents: dict[int, MemoryContent] = {}
        self.deltas: list[Delta] = []

    def take(self, deltas: Iterable[Delta]) -> None:
        """Raises ReplayMismatch if one of them does not fit."""
        for delta in deltas:
            parent = None
            if delta.born is not None:
                self.contents[delta.inode] = MemoryContent()
                parent = None if delta.born.parent is None else self.contents[delta.born.parent]
            apply(delta, self.contents[delta.inode], parent)
            self.deltas.append(delta)

    def bytes_of(self, inode: int) -> bytes:
        return bytes(self.contents[inode].data)

    @property
    def bytes_carried(self) -> int:
        """How many bytes of journals the deltas brought along."""
        return sum(len(getattr(step, "data", b"")) for delta in self.deltas for step in delta.steps)


class RecordingMount(Mount):
    """`record` is where the deltas go. A remount goes on in the same file."""

    @property
    def record(self) -> pathlib.Path:
        return self.state.parent / f"{self.state.name}.deltas"

    def start(self, *arguments: str) -> None:
        words = [str(self.path), str(self.state), str(self.record)]
        if self.config is not None:
            self._config_file.write_text(self.config)
            words += ["--config", str(self._config_file)]
        self._drop_torn_record()
        reading, writing = os.pipe()
        with contextlib.closing(os.fdopen(reading, "rb")) as said:
            with open(self.state.parent / "recording.log", "ab") as log:
                program = [sys.executable, __file__, *words, "--ready-fd", str(writing), *arguments]
                child = subprocess.Popen(program, pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            os.close(writing)
            answer = said.readline()
        if answer != launch.READY:
            child.wait()
            raise AssertionError(f"no mount: {answer!r}\n{(self.state.parent / 'recording.log').read_text()}")
        self._child = child

    def _drop_torn_record(self) -> None:
        """A kill may have come in the middle of a write; then its note does not count either."""
        if self.record.exists():
            decoder = Decoder()
            decoder.feed(self.record.read_bytes())
            while decoder.next() is not NEED_MORE:
                pass
            os.truncate(self.record, decoder.position)

    def stop(self) -> None:
        super().stop()
        assert self._child.wait() == 0

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()  # before its parent has waited, its number is not free and it seems to live on
        subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=False)

    def clear(self) -> None:
        super().clear()
        self._child.wait()

    def flush(self) -> None:
        """Everything that was written so far is noted."""
        assert control.call(self.state, "flush", FLUSH_SECONDS)["dirty"] == 0

    def replica(self) -> Replica:
        made, decoder = Replica(), Decoder()
        decoder.feed(self.record.read_bytes())
        while (delta := decoder.next()) is not NEED_MORE:
            made.take([delta])
        assert decoder.buffered_bytes == 0
        return made


def recorder(path: pathlib.Path) -> Callable[[Iterator[Delta]], Callable[[], None]]:
    """A sink. What it was told, but what did not count, is forgotten."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def sink(deltas: Iterator[Delta]) -> Callable[[], None]:
        records = b"".join(map(encode, deltas))

        def count() -> None:
            assert os.write(file, records) == len(records)

        return count

    return sink


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mountpoint", type=pathlib.Path)
    parser.add_argument("state", type=pathlib.Path)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--config", type=pathlib.Path)
    parser.add_argument("--ready-fd", type=int)
    given = parser.parse_args()
    launch.prepare(launch.Request(given.mountpoint, given.state, "test", given.config))
    settings = config.defaults() if given.config is None else config.parse(given.config.read_text(), str(given.config))
    opened = state.open_state(given.state, "test")

    def ready() -> None:
        os.write(given.ready_fd, launch.READY)
        os.close(given.ready_fd)

    try:
        mount.serve(opened, given.mountpoint, settings, ready, recorder(given.record))
    finally:
        opened.close()


if __name__ == "__main__":
    serve()
