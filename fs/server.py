"""Answering commands: the fs process's side of the control socket (see `control`).

It runs on the loop; a request is bounded in size and answered or refused. The socket is bound relative to the state
folder.
"""

import json
import logging
import os
import pathlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import trio

from deltapool.fs.control import VERSION
from deltapool.fs.errors import UserError
from deltapool.fs.state import CONTROL_SOCKET

BACKLOG = 16

Answer = dict[str, Any]
Handler = Callable[[dict[str, Any]], Coroutine[Any, Any, Answer]]

log = logging.getLogger(__name__)


def listen(folder: pathlib.Path) -> socket.socket:
    """The listening socket in the state folder, 0600. The folder's lock is held, so a socket that is there is a
    leftover."""
    (folder / CONTROL_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    mask = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{CONTROL_SOCKET}")
    finally:
        os.umask(mask)
        os.close(directory)
    listener.listen(BACKLOG)
    return listener


async def serve(listener: socket.socket, handlers: dict[str, Handler], request_bytes_max: int) -> None:
    """Answers requests until it is cancelled."""

    async def converse(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                answer = await _answer(stream, handlers, request_bytes_max)
                await stream.send_all(json.dumps(answer).encode() + b"\n")
            except trio.BrokenResourceError:
                pass  # the command did not wait for the answer

    await trio.serve_listeners(converse, [trio.SocketListener(trio.socket.from_stdlib_socket(listener))])


async def _answer(stream: trio.SocketStream, handlers: dict[str, Handler], request_bytes_max: int) -> Answer:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = await stream.receive_some()
        line += data
        if not data or len(line) > request_bytes_max:
            return {"error": "a request is one line of JSON"}
    try:
        request = json.loads(line)
        if request["version"] != VERSION:
            return {"error": f"the mount speaks version {VERSION} of this protocol, not {request['version']!r}"}
        handler = handlers[request["command"]]
    except (ValueError, KeyError, TypeError):
        return {"error": "unknown request"}
    try:
        return {"result": await handler(request)}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("command %s failed", request["command"])
        return {"error": f"{request['command']} failed: {error!r}; the log has more"}
