"""The local pool: chunks by their digest, on the disk of the state folder. docs/format.md has its layout.

Small bodies go to packs, large ones are files of their own. A file is written under `new/`, synced, and renamed to the
name of its content; then its folder is synced, and only then the index is told (`index`). So after any end the index
names nothing that is not there, and whatever it does not name is removed by the next `Pool`.

`Pool` belongs to the mover, one at a time (`lock`). `PoolReader` may read beside it from any process. What it looked up
may have moved to another pack a moment later: then it looks again.
"""

import contextlib
import fcntl
import os
import pathlib
from typing import Final

from deltapool.cas.body import DELTA_BYTES_MAX, Base, base_of, decode, encode
from deltapool.cas.chunk import Digest
from deltapool.cas.index import Index, Place, PoolError
from deltapool.cas.pack import PackBuilder

INDEX: Final = "index.db"
LOCK: Final = "lock"
PACKS: Final = "packs"
CHUNKS: Final = "chunks"
NEW: Final = "new"
PACKED_BYTES_MAX: Final = 256 << 10
"""Chunks of more plaintext are files of their own."""
READ_TRIES: Final = 5


class MissingChunk(Exception):
    """The pool does not have this chunk."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"chunk {digest.hex()} is missing in the pool")
        self.digest = digest


def file_of(folder: str, name: bytes) -> str:
    """Where a pack or a chunk lies below the pool's folder."""
    return f"{folder}/{name[:1].hex()}/{name.hex()}"


class PoolReader:
    """Raises PoolError if there is no pool."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        if not (folder / INDEX).exists():
            raise PoolError(f"{folder} holds no pool")
        self.index = Index(folder / INDEX, writable=False)

    def close(self) -> None:
        self.index.close()

    def has(self, digest: Digest) -> bool:
        return self.index.find(digest) is not None

    def read(self, digest: Digest) -> bytes:
        """The plaintext, proved. Raises MissingChunk or DamagedChunk."""
        body = self.body(digest)
        base = base_of(body)
        return decode(body, digest, None if base is None else decode(self.body(base), base))

    def body(self, digest: Digest) -> bytes:
        for _ in range(READ_TRIES):
            place = self.index.find(digest)
            if place is None:
                break
            with contextlib.suppress(FileNotFoundError):
                return self._body(digest, place)
        raise MissingChunk(digest)

    def path(self, digest: Digest, place: Place) -> pathlib.Path:
        """Raises FileNotFoundError if the pack went a moment ago."""
        if place.pack is None:
            return self.folder / file_of(CHUNKS, digest)
        name = self.index.pack_name(place.pack)
        if name is None:
            raise FileNotFoundError(f"pack {place.pack}")
        return self.folder / file_of(PACKS, name)

    def _body(self, digest: Digest, place: Place) -> bytes:
        fd = os.open(self.path(digest, place), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, place.length, place.offset)
        finally:
            os.close(fd)


class Pool(PoolReader):
    """Raises PoolError if another process has it."""

    def __init__(self, folder: pathlib.Path) -> None:
        for name in ("", PACKS, CHUNKS, NEW):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise PoolError(f"{folder} is in use by another process") from None
        Index(folder / INDEX, writable=True).close()
        super().__init__(folder)
        self.index.close()
        self.index = Index(folder / INDEX, writable=True)
        self._remove_leftovers()
        self._builder = PackBuilder()
        self._facts: dict[Digest, tuple[int, Digest | None]] = {}
        self._pending: dict[Digest, bytes] = {}
        self._written = 0

    def close(self) -> None:
        super().close()
        os.close(self._lock)

    def has(self, digest: Digest) -> bool:
        return digest in self._pending or super().has(digest)

    def body(self, digest: Digest) -> bytes:
        return self._pending[digest] if digest in self._pending else super().body(digest)

    def add(self, digest: Digest, plain: bytes, near: Digest | None = None) -> int:
        """Stores a chunk unless it is there. `near` is one that it may be like. The bytes that it takes; they are
        durable after `flush`."""
        if self.has(digest):
            return 0
        if len(plain) > PACKED_BYTES_MAX:
            body = encode(plain)
            self._write(file_of(CHUNKS, digest), body)
            self.index.begin()
            self.index.add_object(digest, len(body), len(plain))
            return len(body)
        body = encode(plain, base=self._base(near) if len(plain) <= DELTA_BYTES_MAX else None)
        self.add_body(digest, body, len(plain))
        return len(body)

    def add_body(self, digest: Digest, body: bytes, plain: int) -> None:
        """A body that goes to a pack as it is."""
        if not self._builder.has_room(len(body)):
            self._finish_pack()
        self._builder.add(digest, body)
        self._facts[digest] = (plain, base_of(body))
        self._pending[digest] = body
        if self._builder.full:
            self._finish_pack()

    def _base(self, near: Digest | None) -> Base | None:
        """The chunk that stands alone and that `near` is, or was made on."""
        if near is None:
            return None
        try:
            digest = base_of(self.body(near)) or near
            return Base(digest, self.read(digest))
        except (MissingChunk, ValueError, OSError):
            return None  # damaged or gone: it is no help, and no harm

    def flush(self) -> None:
        """Everything that was added is durable, and the index says so."""
        if len(self._builder):
            self._finish_pack()
        self.index.commit()

    def undo(self) -> None:
        """Forgets what was added since the last `flush`, after an error. Files of it are leftovers."""
        self._builder = PackBuilder()
        self._facts.clear()
        self._pending.clear()
        self.index.rollback()
        self._remove_leftovers()

    def _finish_pack(self) -> None:
        pack = self._builder.finish()
        self._write(file_of(PACKS, pack.name), pack.data)
        self.index.begin()
        self.index.add_pack(pack, self._facts)
        self._builder = PackBuilder()
        self._facts, self._pending = {}, {}

    def _write(self, name: str, data: bytes) -> None:
        """A durable file, whole or not at all."""
        self._written += 1
        new, path = self.folder / NEW / str(self._written), self.folder / name
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700)
            _sync_folder(path.parent.parent)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        _sync_folder(path.parent)

    def _remove_leftovers(self) -> None:
        """Files that the index does not know: of a process that ended before it could tell it."""
        for entry in os.scandir(self.folder / NEW):
            os.unlink(entry.path)
        known = {name.hex() for _, name, _ in self.index.packs()}
        for entry in _files(self.folder / PACKS):
            if entry.name not in known:
                os.unlink(entry.path)
        for entry in _files(self.folder / CHUNKS):
            place = self.index.find(Digest(bytes.fromhex(entry.name)))
            if place is None or place.pack is not None:
                os.unlink(entry.path)


def _files(folder: pathlib.Path) -> list["os.DirEntry[str]"]:
    return [entry for sub in os.scandir(folder) for entry in os.scandir(sub.path)]


def _sync_folder(folder: pathlib.Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
