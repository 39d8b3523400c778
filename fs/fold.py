"""Folding: an agent's writes to a journal -> what really changed. Decisions only; the caller holds the bytes.

Some agents append. Others rewrite the whole file for each line, through O_TRUNC, in place, or as a temporary file that
is renamed over the old one. What they mean is nearly always an append, and only that may reach the disk and the log.

In place, a write is compared with the bytes that it would replace, and only the runs that differ are written.

A truncation to nothing is *held back*. The live file keeps its old bytes, and a cursor says how far the new content
reaches:

    0 ............ cursor ............. length
    [ visible     )[ old bytes, invisible      )      live file, while held

While held, not a byte of the live file is touched. So at any instant it is either the old content, whole, or exactly
the new content so far; never a mixture. A write at the cursor of the bytes that are there moves the cursor. The first
byte that differs, or a gap, has the file truncated, for real, where the new content still equals the old one, and only
then, in a plan of its own, is it written on from there: between the two the caller waits until the disk knows of the
truncation, or a power cut could leave the old length, with old bytes behind new ones. The hold also ends, with nothing
dropped, when the cursor reaches the length, and from outside by `release`. POSIX is kept throughout: `visible_length`
is the size, and live[:visible_length] the content.

A write below the cursor that differs ends the hold too, at the cursor. To patch there and hold on would leave a file
that is neither the old one nor the new one if the host died.

`changed_bytes` counts the bytes that the agent passed and that differ from what is kept, or have nothing to be compared
with. Zeros that a gap or a truncation upwards implies are not counted: nobody passed them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deltapool.cas.digest import Read

GAP_BYTES_MIN = 16
"""Runs that differ, with fewer equal bytes than this between them, are one run."""
RUNS_MAX = 256
"""Runs of one write. The last one takes in all that is left."""
KEEP_BYTES_MIN = 64
"""Fewer bytes than this are appended again rather than kept from the old content."""
NEEDLE_BYTES = (4096, 512, KEEP_BYTES_MIN)
CANDIDATES_MAX = 16
READ_BYTES = 1 << 20

_COMPARE_BYTES = 4096
_XOR_BYTES = 16_384  # the processor's first cache holds the numbers
_ZEROS = bytes(GAP_BYTES_MIN)
_NONZERO = re.compile(rb"[^\0]")


# Comparing. Each step is one call into C over many bytes: a comparison per block, an XOR over the blocks that differ.


def diff(
    old: bytes | memoryview, new: bytes | memoryview, runs_max: int = RUNS_MAX
) -> tuple[list[tuple[int, int]], int]:
    """The runs (half-open) in which two equally long strings differ, and the exact number of bytes that do.

    A run begins and ends with a byte that differs. Between two runs are at least GAP_BYTES_MIN equal bytes. If there
    were more than `runs_max`, the last one spans what is left.
    """
    if len(old) != len(new):
        raise ValueError(f"can't compare {len(old)} bytes with {len(new)}")
    old, new = bytes(old), bytes(new)
    if old == new:
        return [], 0
    runs: list[tuple[int, int]] = []
    count = 0
    for start, end in _differing_blocks(old, new):
        xored = _xor(old[start:end], new[start:end])
        count += len(xored) - xored.count(0)
        _add_runs(runs, start, xored, runs_max)
    return runs, count


def common_prefix(one: bytes, other: bytes) -> int:
    """The number of bytes that both begin with."""
    length = min(len(one), len(other))
    for start in range(0, length, READ_BYTES):
        mine, theirs = one[start : min(start + READ_BYTES, length)], other[start : min(start + READ_BYTES, length)]
        if mine == theirs:
            continue
        for at in range(0, len(mine), _COMPARE_BYTES):
            a, b = mine[at : at + _COMPARE_BYTES], theirs[at : at + _COMPARE_BYTES]
            if a != b:
                difference = _NONZERO.search(_xor(a, b))
                assert difference is not None
                return start + at + difference.start()
    return length


def _differing_blocks(old: bytes, new: bytes) -> list[tuple[int, int]]:
    blocks: list[tuple[int, int]] = []
    for start in range(0, len(old), _COMPARE_BYTES):
        end = min(start + _COMPARE_BYTES, len(old))
        if old[start:end] == new[start:end]:
            continue
        if blocks and blocks[-1][1] == start and end - blocks[-1][0] <= _XOR_BYTES:
            blocks[-1] = (blocks[-1][0], end)
        else:
            blocks.append((start, end))
    return blocks


def _add_runs(runs: list[tuple[int, int]], base: int, xored: bytes, runs_max: int) -> None:
    size = len(xored.rstrip(b"\0"))
    at = 0
    while at < size:
        first = _NONZERO.search(xored, at)
        assert first is not None
        start = first.start()
        end = size if len(runs) >= runs_max else xored.find(_ZEROS, start, size)
        if end < 0:
            end = size
        if runs and (base + start - runs[-1][1] < GAP_BYTES_MIN or len(runs) >= runs_max):
            runs[-1] = (runs[-1][0], base + end)
        else:
            runs.append((base + start, base + end))
        at = end


def _xor(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


# The state of one open journal.


@dataclass(frozen=True, slots=True)
class Truncate:
    """Make the live file shorter."""

    length: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write data[start:end] at `offset`. Past the end of the file, the gap is a hole."""

    offset: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Make the live file longer, by a hole."""

    length: int


Action = Truncate | Write | Extend


@dataclass(frozen=True, slots=True)
class Plan:
    """What the caller does to the live file, in this order. `start` and `end` of a write count within its data."""

    actions: tuple[Action, ...] = ()
    changed_bytes: int = 0
    again: bool = False  # nothing was written yet: ask again when the truncation is durable


NOTHING = Plan()


class Fold:
    """One open journal. Each plan is executed at once, with no await between, in the order of its actions.

    The state is updated when the plan is made. If an action fails, say `reset` with the real length of the live file.
    """

    __slots__ = ("_before", "held_at", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        """The length of the live file."""
        self.held_at: int | None = None
        """While a truncation to nothing is held back: the cursor, which is less than `length`."""
        self._before: tuple[int, int | None] = (length, None)

    @property
    def visible_length(self) -> int:
        return self.length if self.held_at is None else self.held_at

    def overlap_bytes(self, offset: int, size: int) -> int:
        """How many bytes of the live file, from `offset`, `write` wants as `old`. A plan may change that."""
        return max(0, min(offset + size, self.length) - offset)

    def write(self, offset: int, data: bytes | memoryview, old: bytes | memoryview) -> Plan:
        if offset < 0 or len(old) != self.overlap_bytes(offset, len(data)):
            raise ValueError(f"{len(old)} old bytes at {offset}, for {len(data)} bytes in a file of {self.length}")
        self._before = (self.length, self.held_at)
        if not len(data):
            return NOTHING
        if self.held_at is not None:
            return self._write_held(self.held_at, offset, data, old)
        return self._write_through(offset, data, old)

    def truncate(self, length: int) -> Plan:
        if length < 0:
            raise ValueError(f"{length} is no length")
        self._before = (self.length, self.held_at)
        if self.held_at is not None:
            if length <= self.held_at:
                self.held_at = length
                return NOTHING
            return Plan((self._drop(self.held_at), *self._resize(length)))
        if length == 0 and self.length:
            self.held_at = 0
            return NOTHING
        return Plan(self._resize(length))

    def release(self) -> Plan:
        """End the hold: what the agent has not written again is gone now."""
        self._before = (self.length, self.held_at)
        return NOTHING if self.held_at is None else Plan((self._drop(self.held_at),))

    def reset(self, length: int) -> None:
        """An action of the last plan failed, and the live file really has this length.

        If the truncation of a hold is what failed, the hold goes on as before the plan: nobody may see the old bytes.
        """
        before, held_at = self._before
        self.length = length
        self.held_at = held_at if length == before and held_at is not None else None
        self._before = (self.length, self.held_at)

    def _write_through(self, offset: int, data: bytes | memoryview, old: bytes | memoryview) -> Plan:
        overlap, size = len(old), len(data)
        runs, changed = diff(old, data[:overlap]) if overlap else ([], 0)
        if overlap < size:
            changed += size - overlap
            if runs and overlap - runs[-1][1] < GAP_BYTES_MIN:
                runs[-1] = (runs[-1][0], size)
            else:
                runs.append((overlap, size))
        self.length = max(self.length, offset + size)
        return Plan(tuple(Write(offset + start, start, end) for start, end in runs), changed)

    def _write_held(self, cursor: int, offset: int, data: bytes | memoryview, old: bytes | memoryview) -> Plan:
        end = offset + len(data)
        if offset > cursor:
            return Plan((self._drop(cursor),), again=True)
        equal = common_prefix(bytes(old), bytes(data))
        if equal == len(data):
            self._move(max(cursor, end))
            return NOTHING
        if offset + equal < self.length:
            self.length = max(cursor, offset + equal)
            self._move(cursor)
            return Plan((Truncate(self.length),), again=True)
        self.held_at = None  # the old content is all there again, and goes on: nothing to drop
        return self._write_through(offset, data, old)

    def _move(self, cursor: int) -> None:
        self.held_at = cursor if cursor < self.length else None

    def _drop(self, length: int) -> Truncate:
        self.length, self.held_at = length, None
        return Truncate(length)

    def _resize(self, length: int) -> tuple[Action, ...]:
        before, self.length = self.length, length
        if length < before:
            return (Truncate(length),)
        return (Extend(length),) if length > before else ()


# A file that is renamed over a journal.


@dataclass(frozen=True, slots=True)
class Replacement:
    """new = old[:prefix] + old[start : start + length] + new[-appended:], where keep = (start, length).

    Always start > prefix: what is kept moves towards the beginning.
    """

    prefix: int
    keep: tuple[int, int] | None
    appended: int

    @property
    def changed_bytes(self) -> int:
        return self.appended


def compare_replacement(old_length: int, new_length: int, read_old: Read, read_new: Read) -> Replacement:
    """How the new content can be made from the old one.

    An extension and a shortened file are found by their common prefix. Else something was cut out, at the head (of
    which some bytes may look alike: every record begins with the same words) or in the middle, and more may have been
    appended: then what follows the common prefix stands further back in the old content. It is looked for by its first
    bytes, at most CANDIDATES_MAX times for each size of NEEDLE_BYTES, and the longest match is taken. Reads both files
    block by block, the old one as often as there are needles and candidates; it belongs off the loop.
    """
    prefix = _match(read_old, 0, read_new, 0, min(old_length, new_length))
    rest = new_length - prefix
    if prefix == old_length or rest < KEEP_BYTES_MIN:
        return Replacement(prefix, None, rest)
    start, length = _longest_match(old_length, prefix, rest, read_old, read_new)
    if length < KEEP_BYTES_MIN:
        return Replacement(prefix, None, rest)
    return Replacement(prefix, (start, length), rest - length)


def _longest_match(old_length: int, prefix: int, rest: int, read_old: Read, read_new: Read) -> tuple[int, int]:
    """Where new[prefix:] goes on in old[prefix + 1:], and how far."""
    start = old_length - rest  # if nothing was appended, the rest is the end of the old content
    best = (start, _match(read_old, start, read_new, prefix, rest)) if start > prefix else (0, 0)
    if best[1] == rest:
        return best
    head = _read(read_new, prefix, min(NEEDLE_BYTES[0], rest))
    for size in NEEDLE_BYTES:
        if size > len(head) and size != NEEDLE_BYTES[0]:
            continue
        needle = head[:size]
        for count, start in enumerate(_occurrences(read_old, needle, prefix + 1, old_length), 1):
            length = _match(read_old, start, read_new, prefix, min(old_length - start, rest))
            if length > best[1]:
                best = (start, length)
            if length == min(old_length - start, rest) or count == CANDIDATES_MAX:
                break
        if best[1] >= len(needle):
            break
    return best


def _match(read_old: Read, old_at: int, read_new: Read, new_at: int, limit: int) -> int:
    """How many bytes are equal from these places on, at most `limit`."""
    for done in range(0, limit, READ_BYTES):
        size = min(READ_BYTES, limit - done)
        equal = common_prefix(_read(read_old, old_at + done, size), _read(read_new, new_at + done, size))
        if equal < size:
            return done + equal
    return limit


def _occurrences(read: Read, needle: bytes, start: int, end: int) -> Iterator[int]:
    """The places in [start, end) at which the needle begins, ascending."""
    carried = b""
    for at in range(start, end, READ_BYTES):
        block = carried + _read(read, at, min(READ_BYTES, end - at))
        base = at - len(carried)
        found = block.find(needle)
        while found >= 0:
            yield base + found
            found = block.find(needle, found + 1)
        carried = block[-(len(needle) - 1) :]


def _read(read: Read, offset: int, size: int) -> bytes:
    data = read(offset, size)
    if len(data) != size:
        raise EOFError(f"{len(data)} bytes at {offset} instead of {size}: the file changed while it was compared")
    return data
