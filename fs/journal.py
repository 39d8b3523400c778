"""One journal in memory: its fold, what changed since it was last noted, its digests, and its counts.

A journal is noted about once a second: `begin_note` fixes one instant of it in a step of the loop, `examine` (pure
but for the reads; it belongs in a thread) finds digest and line count, and `end_note` takes them over, unless bytes
below the noted length changed meanwhile: then all that was pending stays pending, and the next note covers it.

What changed is kept as ranges of the live file (`extents.Pending`), never as a second copy.
"""

import dataclasses
from array import array
from collections.abc import Callable

from deltapool.cas.digest import SEGMENT_BYTES, SegmentDigests, journal_digest
from deltapool.fs.errors import FilesystemError
from deltapool.fs.extents import AppendRange, PatchRange, Pending
from deltapool.fs.fold import Extend, Fold, Plan, Truncate, Write
from deltapool.fs.inode import Ino
from deltapool.fs.instant import Ancestor, Findings, Instant
from deltapool.fs.livefile import LiveFile
from deltapool.fs.namespace import JournalNote
from deltapool.fs.stats import JournalCounts


class Journal:
    __slots__ = (
        "_before_truncation",
        "_disturbed",
        "_inflight",
        "_line_count",
        "_lines",
        "_noted",
        "_ranges_max",
        "ancestor",
        "born",
        "counts",
        "digests",
        "durable",
        "fold",
        "ino",
        "nuls",
        "pending",
    )

    def __init__(
        self,
        ino: Ino,
        length: int,
        note: JournalNote | None,
        segments: list[tuple[int, bytes, int]],
        ranges_max: int,
        before_truncation: Callable[[int], None] = lambda length: None,
    ) -> None:
        """`note` and `segments` are what the namespace knows of it; a note for another length only lends its counts.
        `before_truncation` is told how long the live file will be before it becomes shorter, and may raise."""
        self.ino = ino
        self._before_truncation = before_truncation
        self.fold = Fold(length)
        self.counts = JournalCounts(note.written, note.changed, note.read, note.folded) if note else JournalCounts()
        self.nuls = bool(note.nuls) if note else False
        self.durable = min(note.durable, length) if note else 0
        self.ancestor: Ancestor | None = None
        fits = note is not None and note.length == length
        self._noted = note if fits else None
        self._ranges_max = ranges_max
        self.digests = SegmentDigests()
        self._lines = array("I")  # newlines in each segment, as far as there are any, as of when its digest was taken
        self._line_count = 0  # the sum
        if fits:
            self.digests.truncated(length)  # what has no row is zeros; but the last part was not kept
            for number, digest, lines in segments:
                self._learn(number, digest, lines)
            self.digests.written(length - length % SEGMENT_BYTES, length)
        else:
            self.digests.written(0, length)
        self.born = not fits
        self.pending = Pending(length if fits else 0, ranges_max)
        if not fits and length:
            self.pending.written(0, length)
        self._inflight: Instant | None = None
        self._disturbed = False

    # --- what agents do

    @property
    def held(self) -> bool:
        return self.fold.held_at is not None

    @property
    def visible_length(self) -> int:
        return self.fold.visible_length

    def overlap(self, offset: int, size: int) -> int:
        """How many old bytes, from `offset` on, `write` wants to see."""
        return self.fold.overlap_bytes(offset, size)

    def has_new_nuls(self, offset: int, data: bytes) -> bool:
        """Whether this write brings the journal's first NUL: given, or implied by a gap."""
        return not self.nuls and (offset > self.visible_length or b"\0" in data)

    def write(self, live: LiveFile, offset: int, data: bytes, old: bytes) -> tuple[int, int] | None:
        """Writes what differs. Returns the bytes accepted, fewer than given if the disk filled up, and the bytes that
        went to the live file. None: it was truncated for this write, to be tried again when that is durable."""
        was_held = self.held
        plan = self.fold.write(offset, data, old)
        if was_held and not self.held:
            self.counts.folded += not plan.again or self.fold.length > 0
        accepted, written = self._execute(live, plan, data)
        if plan.again:
            return None
        self.counts.written += accepted
        self.counts.changed += plan.changed_bytes if accepted == len(data) else min(written, plan.changed_bytes)
        return accepted, written

    def truncate(self, live: LiveFile, length: int) -> None:
        """Sets the length; to nothing is held back."""
        self._execute(live, self.fold.truncate(length), b"")

    def end_hold(self, live: LiveFile) -> None:
        """What was truncated and not written again is gone now, for real."""
        if self.fold.held_at:
            self.counts.folded += 1
        self._execute(live, self.fold.release(), b"")

    def _execute(self, live: LiveFile, plan: Plan, data: bytes) -> tuple[int, int]:
        """Does to the live file what the plan says, and remembers where. Returns how far in `data` it came, and the
        bytes written."""
        written = 0
        view = memoryview(data)
        try:
            for action in plan.actions:
                match action:
                    case Truncate(length):
                        self._before_truncation(length)
                        live.truncate(length)
                        self._truncated(length)
                    case Extend(length):
                        live.truncate(length)
                        self.pending.extended(length)
                        self.digests.truncated(length)
                    case Write(offset, start, end):
                        self._touched(offset)
                        count = live.write(offset, view[start:end])
                        self.pending.written(offset, offset + count)
                        self.digests.written(offset, offset + count)
                        written += count
                        if count < end - start:
                            self.resync(live.stat().st_size)
                            return start + count, written
        except (OSError, FilesystemError):
            self.resync(live.stat().st_size)
            raise
        return len(data), written

    def resync(self, length: int) -> None:
        """The live file really has this length, whatever was planned."""
        self.fold.reset(length)
        if length > self.pending.length:
            self.pending.written(self.pending.length, length)
            self.digests.written(self.digests.length, length)
        elif length < self.pending.length:
            self._truncated(length)

    def _truncated(self, length: int) -> None:
        """The live file ends at `length` now. Nothing that was known of what lay beyond holds for what comes later."""
        self.durable = min(self.durable, length)
        self._touched(length)
        self.pending.truncated(length)
        self.digests.truncated(length)
        self._line_count -= sum(self._lines[length // SEGMENT_BYTES :])
        del self._lines[length // SEGMENT_BYTES :]

    def _learn(self, number: int, digest: bytes | None, lines: int) -> None:
        """What a segment holds; without a digest, what it held up to an instant."""
        if digest is not None:
            self.digests.learn(number, digest)
        if number >= len(self._lines):
            self._lines.extend(array("I", bytes(self._lines.itemsize * (number + 1 - len(self._lines)))))
        self._line_count += lines - self._lines[number]
        self._lines[number] = lines

    def _touched(self, offset: int) -> None:
        if self._inflight is not None and offset < self._inflight.length:
            self._disturbed = True

    def replaced_by(self, own_length: int) -> Ancestor:
        """Another file, `own_length` bytes long, is renamed over this journal. What it will be compared with: this one,
        or, if this one was not noted since it was itself renamed over another, that other one."""
        self.disturb()
        if self.born and self.ancestor is not None:
            return dataclasses.replace(self.ancestor, own_length=own_length)
        return Ancestor(self.ino, self.visible_length, own_length, lambda: self.pending.intact_length)

    def inherit(self, ancestor: Ancestor, counts: JournalCounts) -> bool:
        """This file was renamed over another journal: the life of that one goes on here. False if `ancestor` will not
        be looked at: this file was noted already, as new, or has another ancestor."""
        self.counts.add(counts)
        if not self.born:
            return False
        self.disturb()
        if self.ancestor is None:
            self.counts.changed -= ancestor.own_length  # counted as new so far; the comparison will tell
            self.ancestor = ancestor
        return self.ancestor is ancestor

    def disturb(self) -> None:
        """A note that is being made will not count."""
        self._disturbed = True

    # --- noting

    @property
    def wants_note(self) -> bool:
        return not self.held and (self.pending.changed or self.born or self.ancestor is not None)

    @property
    def is_being_noted(self) -> bool:
        return self._inflight is not None

    def begin_note(self, mtime_ns: int) -> Instant:
        """Fixes an instant. Until `end_note` everything later is pending anew."""
        length = self.fold.length
        intact = self.ancestor.intact() if self.ancestor is not None else 0
        self._inflight = Instant(length, mtime_ns, self.pending, self.born, self.ancestor, intact, self.digests.copy())
        self._disturbed = False
        self.pending = Pending(length, self._ranges_max)
        return self._inflight

    def end_note(self, findings: Findings | None) -> JournalNote | None:
        """Takes over what was found. None (nothing is noted) if the instant was disturbed, or `findings` is None."""
        instant, self._inflight = self._inflight, None
        assert instant is not None
        if instant.ancestor is not None and instant.ancestor.intact() < instant.ancestor_intact:
            self._disturbed = True
        if findings is None or self._disturbed:
            self.pending = _merged(instant.pending, self.pending)
            return None
        if findings.replacement is not None:
            self.counts.changed += findings.replacement.changed_bytes
            self.counts.folded += findings.replacement.prefix > 0
        elif instant.ancestor is not None:
            self.counts.changed += instant.ancestor.own_length
        if instant.born and self.fold.length == instant.length:
            self.nuls = findings.nuls  # all of it was read
        self.born, self.ancestor = False, None
        grew = self.fold.length != instant.length
        for number, lines in findings.lines.items():
            goes_on = grew and number == instant.length // SEGMENT_BYTES
            self._learn(number, None if goes_on else findings.digests.known(number), lines)
        self.durable = instant.length
        self._noted = JournalNote(
            instant.length,
            findings.digests.digest(),
            self._line_count,
            int(self.nuls),
            self.durable,
            instant.mtime_ns,
            *self._counts,
        )
        return self._noted

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        return self.counts.written, self.counts.changed, self.counts.read, self.counts.folded

    @property
    def note(self) -> JournalNote:
        """What is known to be durable, with the present counts and the present answer to whether NULs belong here."""
        noted = self._noted or JournalNote(0, journal_digest(()), 0, 0, 0, 0, 0, 0, 0, 0)
        return JournalNote(
            noted.length, noted.digest, noted.lines, int(self.nuls), self.durable, noted.appended_ns, *self._counts
        )


def _merged(earlier: Pending, later: Pending) -> Pending:
    """Both, as one change since what `earlier` began with."""
    for change in later.plan():
        match change:
            case PatchRange(start, end) | AppendRange(start, end):
                earlier.written(start, end)
            case _:
                if change.length <= earlier.length:
                    earlier.truncated(change.length)
                else:
                    earlier.extended(change.length)
    return earlier
