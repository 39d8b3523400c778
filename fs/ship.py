"""From an instant of a journal to the deltas that lead to it from what was noted of it before. Pure: bytes come through
`read`.

A journal of which something was noted ships its pending changes. A new one is born under its provisional path, with all
of its bytes; if it was renamed over another journal, with what both have in common taken from that one. A reader of the
deltas knows the other journal as it was *noted last*, so only that much of it is referred to (`ancestor_intact`); what
agents did to it after that is shipped again.

Records are bounded: each delta but the last ends where a segment of the digest ends, so the digests of the instant
prove them all.
"""

from collections.abc import Iterator

from deltapool.cas.digest import Read
from deltapool.fs.delta import Born, Delta, Step, steps_of, steps_of_replacement
from deltapool.fs.extents import AppendRange, Pending, Slice, TruncateTo
from deltapool.fs.fold import Replacement
from deltapool.fs.instant import Findings, Instant

SLICE_BYTES_MAX = 8 << 20


def deltas(
    ino: int,
    mode: int,
    path: bytes,
    instant: Instant,
    findings: Findings,
    read: Read,
    slice_bytes_max: int = SLICE_BYTES_MAX,
) -> Iterator[Delta]:
    """`path` is where the journal is now; it matters only if the journal is born. `read` reads its live file.

    What is read is right only if the note counts in the end. Raises EOFError if the live file is shorter than the
    instant says."""
    born: Born | None = None
    steps: tuple[Step, ...] = ()
    pending = instant.pending
    if instant.born:
        born, steps, pending = _birth(mode, path, instant, findings.replacement)
    slices = pending.slices(slice_bytes_max)
    if born is not None and not slices:
        slices = (Slice((), instant.length),)
    for part in slices:
        end = part.length_after
        steps += steps_of(part.changes, read)
        yield Delta(ino, instant.mtime_ns, born, steps, end, findings.digests.digest(end))
        born, steps = None, ()


def _birth(
    mode: int, path: bytes, instant: Instant, replacement: Replacement | None
) -> tuple[Born, tuple[Step, ...], Pending]:
    """How the journal begins, the steps that this takes, and what is left to be shipped then."""
    if instant.ancestor is None or replacement is None:
        return Born(path, mode), (), instant.pending
    replacement = _known_part(replacement, instant.ancestor_intact)
    prefix_length, steps = steps_of_replacement(replacement, b"")
    if not prefix_length:
        return Born(path, mode), (), instant.pending
    taken = replacement.prefix + (replacement.keep[1] if replacement.keep is not None else 0)
    return Born(path, mode, instant.ancestor.ino, prefix_length), steps, _rest(instant.pending, taken)


def _known_part(replacement: Replacement, intact: int) -> Replacement:
    """The same with no byte of the ancestor beyond the first `intact` ones."""
    if replacement.keep is not None and sum(replacement.keep) <= intact:
        return replacement
    return Replacement(min(replacement.prefix, intact), None, 0)


def _rest(pending: Pending, start: int) -> Pending:
    """What a journal of which nothing was noted has to ship from `start` on, holes kept."""
    rest = Pending(start)
    for change in pending.plan():
        match change:
            case AppendRange(first, end) if end > start:
                rest.written(max(first, start), end)
            case TruncateTo(length) if length > start:
                rest.extended(length)
    return rest
