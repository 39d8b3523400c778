"""The control socket: how commands ask a running fs process. One JSON object a line each way, version 1
(docs/format.md).

The server runs on the loop; a request is bounded in size and answered or refused. The client is synchronous and lives
in the command. The socket is bound and reached relative to the state folder, whose path may be longer than a socket
address.
"""

import json
import logging
import os
import pathlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import trio

from deltapool.fs.errors import UserError
from deltapool.fs.state import CONTROL_SOCKET

VERSION = 1
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


def call(folder: pathlib.Path, command: str, timeout_seconds: float, **arguments: Any) -> Any:
    """Asks the fs process that holds `folder`. Raises UserError if it does not answer or refuses."""
    try:
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_seconds)
            client.connect(f"/proc/self/fd/{directory}/{CONTROL_SOCKET}")
            client.sendall(json.dumps({"version": VERSION, "command": command, **arguments}).encode() + b"\n")
            with client.makefile("rb") as file:
                answer = json.loads(file.readline())
    except PermissionError:
        raise UserError(f"{folder} belongs to another user") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise UserError(f"no mount is running on {folder}") from None
    except TimeoutError:
        raise UserError(f"the mount on {folder} did not answer within {timeout_seconds:g} s") from None
    except (ValueError, OSError) as error:
        raise UserError(f"the mount on {folder} gave no answer: {error}") from None
    finally:
        os.close(directory)
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return answer["result"]
