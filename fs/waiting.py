"""Waiting for two things at once."""

from collections.abc import Coroutine
from typing import Any

import trio

from deltapool.fs.errors import FilesystemError


async def both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Two waits side by side. The first error is raised when both have ended."""
    failed: list[Exception] = []

    async def attempt(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (FilesystemError, OSError) as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, one)
        nursery.start_soon(attempt, other)
    if failed:
        raise failed[0]
