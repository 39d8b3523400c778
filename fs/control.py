"""Asking a running fs process: the client's side of the control socket, synchronous, for commands.

One JSON object a line each way, version 1 (docs/format.md). The socket is reached relative to the state folder, whose
path may be longer than a socket address.
"""

import json
import os
import pathlib
import socket
from typing import Any

from deltapool.fs.errors import UserError
from deltapool.fs.state import CONTROL_SOCKET

VERSION = 1


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
