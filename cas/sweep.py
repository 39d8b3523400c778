"""Sweeping the pool: what no recipe names is removed, and packs of which little is left are written again.

Everything that is alive is found from the recipes themselves, each time: no count can be wrong. Bases of living deltas
stay. Rows go before files, so an end at any point leaves leftovers, and no chunk that the index names is missing.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from deltapool.cas.pack import PackName
from deltapool.cas.pool import CHUNKS, PACKS, Pool, file_of
from deltapool.cas.recipe import Recipe

ALIVE_LEAST: Final = 0.5
"""A pack of which less is alive is written again."""


@dataclass(frozen=True, slots=True)
class Swept:
    bytes_freed: int
    history_bytes: int
    """What chunks take up that only the past has."""


def sweep(pool: Pool, present: Iterable[Recipe], past: Iterable[Recipe]) -> Swept:
    """Nothing may be added to the pool meanwhile, and no recipe to the namespace."""
    before = pool.index.figures()[2]
    now = {chunk.digest for recipe in present for chunk in recipe.chunks()}
    alive = now | {chunk.digest for recipe in past for chunk in recipe.chunks()}
    chunks = pool.index.chunks()
    bases = {place.base for digest, place in chunks if digest in alive and place.base is not None}
    now |= {place.base for digest, place in chunks if digest in now and place.base is not None}
    alive |= bases
    dead = [digest for digest, _ in chunks if digest not in alive]
    own = [digest for digest, place in chunks if digest not in alive and place.pack is None]
    if dead:
        pool.index.begin()
        pool.index.remove_chunks(dead)
        pool.index.commit()
        for digest in own:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pool.folder / file_of(CHUNKS, digest))
    _compact(pool)
    history = sum(place.length for digest, place in chunks if digest in alive and digest not in now)
    return Swept(before - pool.index.figures()[2], history)


def _compact(pool: Pool) -> None:
    gone: list[tuple[int, PackName]] = []
    for number, name, size in pool.index.packs():
        entries = pool.index.in_pack(number)
        if sum(place.length for _, place in entries) >= ALIVE_LEAST * size:
            continue
        gone.append((number, name))
        for digest, place in entries:
            pool.add_body(digest, pool.body(digest), place.plain)
    if not gone:
        return
    pool.flush()
    pool.index.begin()
    for number, _ in gone:
        if not pool.index.in_pack(number):
            pool.index.remove_pack(number)
    pool.index.commit()
    for number, name in gone:
        if pool.index.pack_name(number) is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pool.folder / file_of(PACKS, name))
