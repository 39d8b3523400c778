"""Which part of the history may go: against the policy said in the plainest way, and what must never go."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.retention import DAY_NS, HOUR_NS, Cut, Drops, RetentionLimits, Version, cut_at, drops, kept_by_age

reproducible = settings(derandomize=True, database=None, deadline=None)
NOW = 20_000 * DAY_NS + 13 * HOUR_NS + HOUR_NS // 3
UNBOUNDED = RetentionLimits(1 << 60)
MINUTE_NS = HOUR_NS // 60


def numbered(ages_ns: Sequence[int], snapshots: Collection[int] = ()) -> list[Cut]:
    """Cuts of these ages, the oldest first; numbers from 1."""
    return [
        Cut(number, NOW - age, number in snapshots) for number, age in enumerate(sorted(ages_ns, reverse=True), start=1)
    ]


def needed(version: Version, cuts: Collection[int]) -> bool:
    return any(version.first <= number and (version.end is None or number < version.end) for number in cuts)


def naive(cuts: Sequence[Cut], versions: Sequence[Version], now_ns: int, limits: RetentionLimits) -> Drops:
    """The rules of the module, one after the other, each by looking at everything."""
    kept = set()
    for cut in cuts:
        age = now_ns - cut.time_ns
        hour = [each.number for each in cuts if each.time_ns // HOUR_NS == cut.time_ns // HOUR_NS]
        day = [each.number for each in cuts if each.time_ns // DAY_NS == cut.time_ns // DAY_NS]
        if (
            cut.is_snapshot
            or cut.number == max(each.number for each in cuts)
            or age < limits.all_ns
            or (age < limits.hourly_ns and cut.number == max(hour))
            or (age < limits.daily_ns and cut.number == max(day))
        ):
            kept.add(cut.number)
    sizes = {version.id: 0 if version.is_emptied else version.bytes for version in versions}
    emptied: set[int] = set()
    snapshots = {cut.number for cut in cuts if cut.is_snapshot}

    def history() -> int:
        return sum(
            sizes[each.id]
            for each in versions
            if each.end is not None and needed(each, kept) and each.id not in emptied
        )

    for version in sorted(versions, key=lambda each: (each.first, each.id)):
        loose = version.end is not None and needed(version, kept) and not needed(version, snapshots)
        if history() > limits.history_bytes_max and loose and version.was_open and not version.is_emptied:
            emptied.add(version.id)
    for number in sorted(kept - snapshots):
        if history() > limits.history_bytes_max and number != max(cut.number for cut in cuts):
            kept.discard(number)
    gone = {each.id for each in versions if each.end is not None and not needed(each, kept)}
    dropped = {cut.number for cut in cuts} - kept
    return Drops(tuple(sorted(dropped)), tuple(sorted(gone)), tuple(sorted(emptied - gone)), history())


ages = st.one_of(
    st.integers(-2 * HOUR_NS, 40 * DAY_NS),
    st.integers(0, 2 * HOUR_NS),
    st.integers(0, 40 * 24).map(lambda hours: hours * HOUR_NS),
    st.integers(20 * HOUR_NS, 50 * HOUR_NS),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Cut], list[Version]]:
    times = draw(st.lists(ages, max_size=25))
    if draw(st.booleans()):
        times = sorted(times, reverse=True)  # else the clock was set now and then
    cuts = [Cut(number, NOW - age, draw(st.integers(0, 9)) == 0) for number, age in enumerate(times, start=1)]
    versions = []
    for each in range(draw(st.integers(0, 15))):
        first = draw(st.integers(1, 26))
        end = draw(st.one_of(st.none(), st.integers(first + 1, 28))) if first < 26 else None
        size = draw(st.integers(0, 100))
        versions.append(Version(each, first, end, size, draw(st.booleans()), draw(st.integers(0, 9)) == 0))
    return cuts, versions


limits = st.integers(0, 500).map(RetentionLimits)


def applied(cuts: list[Cut], versions: list[Version], dropped: Drops) -> tuple[list[Cut], list[Version]]:
    return [cut for cut in cuts if cut.number not in dropped.cuts], [
        replace(version, is_emptied=version.is_emptied or version.id in dropped.emptied)
        for version in versions
        if version.id not in dropped.versions
    ]


@settings(reproducible, max_examples=400)
@given(histories(), limits)
def test_it_is_the_policy_said_plainly(history: tuple[list[Cut], list[Version]], bound: RetentionLimits) -> None:
    cuts, versions = history
    assert drops(cuts, versions, NOW, bound) == naive(cuts, versions, NOW, bound)
    assert drops(cuts[::-1], versions[::-1], NOW, bound) == naive(cuts, versions, NOW, bound)


@settings(reproducible, max_examples=250)
@given(histories(), limits)
def test_some_things_never_go(history: tuple[list[Cut], list[Version]], bound: RetentionLimits) -> None:
    cuts, versions = history
    dropped = drops(cuts, versions, NOW, bound)
    left, _ = applied(cuts, versions, dropped)
    if cuts:
        assert left[-1] == cuts[-1]
    assert {cut.number for cut in cuts if cut.is_snapshot} <= {cut.number for cut in left}
    snapshots = [cut.number for cut in cuts if cut.is_snapshot]
    kept = [cut.number for cut in left]
    for version in versions:
        if version.end is None or needed(version, snapshots):
            assert version.id not in dropped.versions + dropped.emptied
        elif needed(version, kept):
            assert version.id not in dropped.versions
            assert version.was_open or version.id not in dropped.emptied
        else:
            assert version.id in dropped.versions


@settings(reproducible, max_examples=250)
@given(histories(), limits)
def test_dropping_twice_drops_nothing_more(history: tuple[list[Cut], list[Version]], bound: RetentionLimits) -> None:
    first = drops(*history, NOW, bound)
    again = drops(*applied(*history, first), NOW, bound)
    assert again == Drops((), (), (), first.history_bytes)


@settings(reproducible, max_examples=250)
@given(histories(), limits, st.integers(0, 100), st.integers(0, 20 * DAY_NS))
def test_less_room_and_more_time_drop_no_less(
    history: tuple[list[Cut], list[Version]], bound: RetentionLimits, less: int, later: int
) -> None:
    cuts, versions = history
    tight = RetentionLimits(max(0, bound.history_bytes_max - less))
    assert set(drops(cuts, versions, NOW, bound).cuts) <= set(drops(cuts, versions, NOW, tight).cuts)
    assert kept_by_age(cuts, NOW + later, bound) <= kept_by_age(cuts, NOW, bound)


@settings(reproducible, max_examples=250)
@given(st.lists(ages, max_size=40), st.lists(st.integers(0, 40 * DAY_NS), max_size=6))
def test_how_often_it_runs_changes_nothing(times: list[int], runs: list[int]) -> None:
    cuts, end = numbered(times), NOW + 40 * DAY_NS
    left = cuts
    for later in sorted(runs):
        seen = [cut for cut in cuts if cut.time_ns > NOW + later]  # not made yet
        kept = kept_by_age([cut for cut in left if cut not in seen], NOW + later, UNBOUNDED)
        left = [cut for cut in left if cut.number in kept or cut in seen]
    assert kept_by_age(left, end, UNBOUNDED) == kept_by_age(cuts, end, UNBOUNDED)


def test_an_hour_a_day_a_month() -> None:
    cuts = numbered([minutes * MINUTE_NS for minutes in range(0, 60 * 24 * 35, 5)])
    numbers = kept_by_age(cuts, NOW, UNBOUNDED)
    kept = [NOW - cut.time_ns for cut in cuts if cut.number in numbers]
    assert [age for age in kept if age < HOUR_NS] == [minutes * MINUTE_NS for minutes in range(55, -5, -5)]
    assert 22 <= len([age for age in kept if HOUR_NS <= age < DAY_NS]) <= 24
    assert 28 <= len([age for age in kept if DAY_NS <= age < 30 * DAY_NS]) <= 30
    assert max(kept) < 30 * DAY_NS


def test_a_file_rewritten_every_second_does_not_fill_a_disk() -> None:
    size, seconds = 1 << 20, 3600
    cuts = [Cut(number, NOW - (seconds - number) * 10**9) for number in range(1, seconds + 1)]
    versions = [Version(number, number, number + 1, size) for number in range(1, seconds)]
    versions.append(Version(seconds, seconds, None, size))
    dropped = drops(cuts, versions, NOW, RetentionLimits(100 * size))
    assert dropped.history_bytes == 100 * size
    left, _ = applied(cuts, versions, dropped)
    assert [cut.number for cut in left] == list(range(seconds - 100, seconds + 1))


def test_what_was_open_goes_before_what_is_older() -> None:
    cuts = numbered([3 * MINUTE_NS, 2 * MINUTE_NS, MINUTE_NS, 0])
    versions = [
        Version(1, 1, 2, 10),
        Version(2, 2, 3, 10, was_open=True),
        Version(3, 3, 4, 10),
        Version(4, 4, None, 10),
    ]
    assert drops(cuts, versions, NOW, RetentionLimits(30)) == Drops((), (), (), 30)
    assert drops(cuts, versions, NOW, RetentionLimits(25)) == Drops((), (), (2,), 20)
    assert drops(cuts, versions, NOW, RetentionLimits(15)) == Drops((1,), (1,), (2,), 10)
    assert drops(cuts, versions, NOW, RetentionLimits(0)) == Drops((1, 2, 3), (1, 2, 3), (), 0)


def test_at_a_time_is_the_last_cut_by_then() -> None:
    cuts = numbered([30, 20, 10])
    assert [cut_at(cuts, NOW - age) for age in (31, 30, 21, 20, 0)] == [None, cuts[0], cuts[0], cuts[1], cuts[2]]
    assert cut_at([], NOW) is None
    set_back = [*cuts, Cut(4, NOW - 25)]
    assert cut_at(set_back, NOW - 22) == set_back[3]


@pytest.mark.parametrize("end", [None, 2])
def test_without_cuts_only_what_is_current_stays(end: int | None) -> None:
    version = Version(1, 1, end, 5)
    assert drops([], [version], NOW, UNBOUNDED).versions == (() if end is None else (1,))
