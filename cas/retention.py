"""Which part of the history may go. A pure policy: it is given what there is, and says what to drop.

A *cut* is one instant of the whole workspace. A *version* is one content of one file: it is valid from the cut that
made it, `first`, up to but not including the cut that ended it, `end`; a current version has no end. What the workspace
was at a cut is made of the versions that are valid there. So history is thinned by cuts, and a version may go when no
kept cut lies in [first, end). Everything is defined by this:

* `--at TIME` is the last kept cut that is not younger than TIME (`cut_at`). Dropping cuts makes the answer coarser, and
  never wrong or mixed: each kept cut is whole.
* Cuts younger than an hour are kept, all of them. Of those younger than a day the last of each hour, of those younger
  than 30 days the last of each day (UTC), of older ones none.
* Kept whatever the figures say: the last cut, cuts that are snapshots, current versions, and versions that are valid in
  a snapshot.
* Then, while the versions that are left have more than `history_bytes_max`: versions that were taken of a file that was
  open for writing are emptied first, the oldest first. Kept cuts still name such a version, so its row stays, and says
  that its content is gone: a file that can't be had any more is not one that did not exist. Then cuts go, the oldest
  first, each with the versions that only it and its elders kept. Current versions do not count: they are the workspace,
  and a large one must not cost it its history.

The last of an hour or a day is the one with the highest number among all cuts of that hour or day, which begin where
the clock's do. A day has whole hours, so the last of a day is the last of an hour: what thinning drops would be dropped
later too, and what it keeps is what it would keep had nothing been dropped before. When and how often it runs changes
nothing. A clock that is set changes how fine the history is, and nothing else: cuts are ordered by their numbers, and
one whose time lies in the future counts as young.

`Version.bytes` is what dropping it is believed to free. Chunks are shared, so that is an estimate: the caller measures
what was freed and asks again. Dropping twice with the same figures drops nothing more.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

HOUR_NS: Final = 3_600 * 10**9
DAY_NS: Final = 24 * HOUR_NS


@dataclass(frozen=True, slots=True)
class Cut:
    number: int
    time_ns: int
    is_snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Version:
    id: int
    first: int
    """The number of the cut that made it."""
    end: int | None
    """The number of the first cut that no longer has it; None: it is current."""
    bytes: int
    was_open: bool = False
    is_emptied: bool = False


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    history_bytes_max: int
    all_ns: int = HOUR_NS
    hourly_ns: int = DAY_NS
    daily_ns: int = 30 * DAY_NS


@dataclass(frozen=True, slots=True)
class Drops:
    """What may go, ascending, and the bytes of what is then left of the versions that are not current."""

    cuts: tuple[int, ...]
    versions: tuple[int, ...]
    """No kept cut has them."""
    emptied: tuple[int, ...]
    """A kept cut has them: their content goes, and that it went is noted."""
    history_bytes: int


def cut_at(kept: Iterable[Cut], time_ns: int) -> Cut | None:
    """The cut that `--at` means: the last one that was made by then."""
    return max((cut for cut in kept if cut.time_ns <= time_ns), key=lambda cut: cut.number, default=None)


def kept_by_age(cuts: Collection[Cut], now_ns: int, limits: RetentionLimits) -> frozenset[int]:
    """The numbers of the cuts that thinning keeps."""
    last_of: dict[tuple[int, int], int] = {}
    kept = {cut.number for cut in cuts if cut.is_snapshot}
    kept.update(sorted(cut.number for cut in cuts)[-1:])
    for unit_ns in (HOUR_NS, DAY_NS):
        for cut in cuts:
            unit = (unit_ns, cut.time_ns // unit_ns)
            last_of[unit] = max(cut.number, last_of.get(unit, cut.number))
    for cut in cuts:
        age_ns = now_ns - cut.time_ns
        if age_ns < limits.all_ns:
            kept.add(cut.number)
        elif age_ns < limits.hourly_ns:
            kept.add(last_of[HOUR_NS, cut.time_ns // HOUR_NS])
        elif age_ns < limits.daily_ns:
            kept.add(last_of[DAY_NS, cut.time_ns // DAY_NS])
    return frozenset(kept)


def drops(cuts: Collection[Cut], versions: Iterable[Version], now_ns: int, limits: RetentionLimits) -> Drops:
    """What the policy drops of this history. The order of what is given means nothing."""
    kept = sorted(kept_by_age(cuts, now_ns, limits))
    snapshots = sorted(cut.number for cut in cuts if cut.is_snapshot)
    past = [version for version in versions if version.end is not None]
    alive = [version for version in past if _last_within(kept, version) is not None]
    loose = sorted((v for v in alive if _last_within(snapshots, v) is None), key=lambda v: (v.first, v.id))
    excess = sum(_bytes(version) for version in alive) - limits.history_bytes_max

    emptied: set[int] = set()
    for version in loose:
        if excess > 0 and version.was_open and not version.is_emptied:
            emptied.add(version.id)
            excess -= version.bytes

    held: dict[int | None, int] = dict.fromkeys(kept, 0)  # the bytes that go with a cut, once all older ones are gone
    for version in loose:
        if version.id not in emptied:
            held[_last_within(kept, version)] += _bytes(version)
    given_up, pinned = set[int](), frozenset(snapshots)
    for number in kept[:-1]:
        if excess > 0 and number not in pinned:
            given_up.add(number)
            excess -= held[number]

    left = [number for number in kept if number not in given_up]
    gone = {version.id for version in past if _last_within(left, version) is None}
    return Drops(
        tuple(sorted({cut.number for cut in cuts}.difference(left))),
        tuple(sorted(gone)),
        tuple(sorted(emptied - gone)),
        limits.history_bytes_max + excess,
    )


def _bytes(version: Version) -> int:
    return 0 if version.is_emptied else version.bytes


def _last_within(numbers: Sequence[int], version: Version) -> int | None:
    """The last of these cuts, ascending, that has the version."""
    last = len(numbers) if version.end is None else bisect_left(numbers, version.end)
    return numbers[last - 1] if last and numbers[last - 1] >= version.first else None
