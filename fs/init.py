"""The FUSE INIT handshake, with flags that pyfuse3 does not offer.

libfuse reads INIT from a socket pair instead of the device and answers into it; the flags of the answer are edited;
then the device is put back. Any surprise falls back to libfuse's own answer, which is slower, but right. Layout of
the messages: include/uapi/linux/fuse.h.

On: EXPLICIT_INVAL_DATA (a file's pages stay cached when its size or mtime change through the mount), CACHE_SYMLINKS,
PARALLEL_DIROPS, HANDLE_KILLPRIV_V2 (the kernel leaves set-id bits to us, and does not ask for a capability before every
write). Off: AUTO_INVAL_DATA, which drops all pages of a file at the first stat after a write.
"""

import logging
import os
import socket
import struct

import pyfuse3

from deltapool.fs.loop import SLOW_PATH

log = logging.getLogger(__name__)

OPCODE_INIT = 26
REQUEST_HEADER_BYTES, REPLY_HEADER_BYTES = 40, 16
FLAGS_OFFSET = 12  # in fuse_init_in and in fuse_init_out
AUTO_INVAL_DATA = 1 << 12
PARALLEL_DIROPS = 1 << 18
CACHE_SYMLINKS = 1 << 23
EXPLICIT_INVAL_DATA = 1 << 25
HANDLE_KILLPRIV_V2 = 1 << 28
ON = EXPLICIT_INVAL_DATA | CACHE_SYMLINKS | PARALLEL_DIROPS | HANDLE_KILLPRIV_V2
OFF = AUTO_INVAL_DATA
MESSAGE_BYTES_MAX = 1 << 21


def edited(reply: bytes, offered: int, on: int = ON, off: int = OFF) -> bytes:
    """The INIT answer with other flags: those of `on` that the kernel offered, none of `off`. Unless the kernel takes
    EXPLICIT_INVAL_DATA, AUTO_INVAL_DATA stays, since nothing else would then keep its pages right. Raises ValueError
    for what is no INIT answer."""
    if len(reply) < REPLY_HEADER_BYTES + FLAGS_OFFSET + 4:
        raise ValueError(f"an INIT answer of {len(reply)} bytes")
    length, error = struct.unpack_from("<Ii", reply)
    if length != len(reply) or error != 0:
        raise ValueError(f"an INIT answer with length {length} and error {error}")
    if not offered & EXPLICIT_INVAL_DATA:
        off &= ~AUTO_INVAL_DATA
    result = bytearray(reply)
    (flags,) = struct.unpack_from("<I", reply, REPLY_HEADER_BYTES + FLAGS_OFFSET)
    struct.pack_into("<I", result, REPLY_HEADER_BYTES + FLAGS_OFFSET, (flags | (on & offered)) & ~off)
    return bytes(result)


def offered_flags(request: bytes) -> int:
    """The flags that the kernel offers. Raises ValueError if this is no INIT request."""
    if len(request) < REQUEST_HEADER_BYTES + FLAGS_OFFSET + 4 or struct.unpack_from("<I", request, 4)[0] != OPCODE_INIT:
        raise ValueError("the first request is no INIT")
    return int(struct.unpack_from("<I", request, REQUEST_HEADER_BYTES + FLAGS_OFFSET)[0])


def install(device: int) -> bool:
    """Arranges for the flags to be edited. After `pyfuse3.init` (and `loop.install`), before `pyfuse3.main`. False:
    libfuse's flags stay."""
    ordinary = getattr(pyfuse3, SLOW_PATH, None)
    if ordinary is None:
        return False
    kept = os.dup(device)
    ours, libfuse_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = os.read(kept, MESSAGE_BYTES_MAX)
    ours.send(request)
    os.dup2(libfuse_end.fileno(), device, inheritable=False)
    libfuse_end.close()
    calls = 0

    async def wait() -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            return True  # libfuse reads INIT from the pair and answers into it
        reply = ours.recv(MESSAGE_BYTES_MAX)
        try:
            answer = edited(reply, offered_flags(request))
        except ValueError as error:
            log.warning("INIT is left as libfuse answered it: %s", error)
            answer = reply
        os.dup2(kept, device, inheritable=False)
        os.write(kept, answer)
        os.close(kept)
        ours.close()
        setattr(pyfuse3, SLOW_PATH, ordinary)
        return bool(await ordinary())

    setattr(pyfuse3, SLOW_PATH, wait)
    return True
