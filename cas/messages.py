"""What the fs process and the mover say to each other: one question, one answer, in frames on a socket pair.

A frame is its length, 4 bytes, big-endian, and that many bytes of MessagePack. The first question is `Hello`, the first
answer `Welcome`; they name the version of all this, and both ends are of one version or part.
"""

from typing import Final

import msgspec

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 64 << 20
_LENGTH_BYTES: Final = 4


class Hello(msgspec.Struct, tag=True, frozen=True):
    version: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    version: int
    pid: int


class Job(msgspec.Struct, frozen=True):
    """One content to be stored. Paths are below the state folder.

    `kept` is where its live file is if that path leads elsewhere by now. `dirty`: the ranges that may differ from
    the content of recipe `base`; None: all of it. `undo`: the position in the undo log at which it was pinned.
    `seal`: it is a journal's, and cut at fixed offsets."""

    ino: int
    path: str
    kept: str
    length: int
    dirty: list[tuple[int, int]] | None
    base: int | None
    undo: tuple[int, int]
    seal: bool


class Store(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Stored` once everything that the results name is durable in the pool."""

    jobs: list[Job]


class Result(msgspec.Struct, frozen=True):
    """`same`: the content is that of the base. Else `recipe` is its record, one that stands alone; or `error` says why
    the content could not be stored. `bytes_new`: what the pool grew by for it."""

    ino: int
    recipe: bytes | None = None
    same: bool = False
    bytes_new: int = 0
    error: str | None = None


class Stored(msgspec.Struct, tag=True, frozen=True):
    results: list[Result]


class Sweep(msgspec.Struct, tag=True, frozen=True):
    """Removes from the pool what no recipe of the namespace names. Asked while no content is being stored."""


class Swept(msgspec.Struct, tag=True, frozen=True):
    """`history_bytes`: what chunks take up that only past versions and ended eras have."""

    bytes_freed: int
    history_bytes: int


class Figures(msgspec.Struct, tag=True, frozen=True):
    pass


class Counted(msgspec.Struct, tag=True, frozen=True):
    """What is in the pool: chunks, the bytes of their plaintexts, and those that they take up."""

    chunks: int
    bytes_plain: int
    bytes_stored: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


Request = Hello | Store | Sweep | Figures
Answer = Welcome | Stored | Swept | Counted | Refused

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def frame_size(data: bytes | bytearray) -> int | None:
    """How long the frame is that `data` begins with, None if that is not there yet. ValueError if it is none."""
    if len(data) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(data[:_LENGTH_BYTES], "big")
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes")
    return _LENGTH_BYTES + size


def request(data: bytes) -> Request:
    """ValueError if this frame is none."""
    return _requests.decode(data[_LENGTH_BYTES:])


def answer(data: bytes) -> Answer:
    """ValueError if this frame is none."""
    return _answers.decode(data[_LENGTH_BYTES:])
