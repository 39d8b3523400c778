"""Ranges against a set of positions, and a plan against two copies of a file: it makes one from the other."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.digest import SEGMENT_BYTES
from deltapool.fs.extents import (
    HOLE_BYTES_MIN,
    SLICE_BYTES_MIN,
    AppendRange,
    Change,
    Extents,
    PatchRange,
    Pending,
    Slice,
    TruncateTo,
)

reproducible = settings(derandomize=True, database=None, deadline=None)


def extents(*ranges: tuple[int, int]) -> Extents:
    made = Extents()
    for start, end in ranges:
        made.add(start, end)
    return made


# Extents


def test_ranges_that_touch_are_one() -> None:
    assert list(extents((5, 7), (0, 2), (2, 5))) == [(0, 7)]


def test_the_nearest_gaps_are_filled() -> None:
    ranges = extents((0, 1), (3, 4), (10, 11), (12, 13), (30, 31))
    ranges.merge_nearest(3)
    assert list(ranges) == [(0, 4), (10, 13), (30, 31)]
    ranges.merge_nearest(1)
    assert list(ranges) == [(0, 31)]
    ranges.merge_nearest(1)
    assert list(ranges) == [(0, 31)]
    with pytest.raises(ValueError, match="fewer than one"):
        ranges.merge_nearest(0)


def test_the_smallest_are_dropped() -> None:
    ranges = extents((0, 1), (3, 9), (10, 12), (20, 29))
    ranges.drop_smallest(2)
    assert list(ranges) == [(3, 9), (20, 29)]
    ranges.drop_smallest(2)
    assert len(ranges) == 2


def test_no_range_is_refused() -> None:
    for start, end in ((2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="no range"):
            Extents().add(start, end)


bounds = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))


@settings(reproducible, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "clip"]), bounds), max_size=20))
def test_extents_are_a_set_of_positions(calls: list[tuple[str, tuple[int, int]]]) -> None:
    ranges, model = Extents(), set[int]()
    for call, (start, end) in calls:
        if call == "add":
            ranges.add(start, end)
            model |= set(range(start, end))
        elif call == "remove":
            ranges.remove(start, end)
            model -= set(range(start, end))
        else:
            ranges.clip(end)
            model &= set(range(end))
        listed = list(ranges)
        assert {at for start, end in listed for at in range(start, end)} == model
        assert all(start < end for start, end in listed)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(listed))
        assert ranges.total_bytes == len(model)
        assert bool(ranges) == bool(model)
        assert len(ranges) == len(listed)


# Pending


def test_an_append_is_one_range() -> None:
    pending = Pending(100)
    assert (pending.changed, pending.plan()) == (False, ())
    pending.written(100, 120)
    pending.written(120, 130)
    assert pending.changed
    assert pending.plan() == (AppendRange(100, 130),)
    assert pending.ship_bytes == 30


def test_a_write_across_the_kept_length_is_a_patch_and_an_append() -> None:
    pending = Pending(100)
    pending.written(90, 110)
    assert pending.plan() == (PatchRange(90, 100), AppendRange(100, 110))


def test_a_truncation_is_kept_at_its_lowest() -> None:
    pending = Pending(100)
    pending.written(20, 40)
    pending.truncated(30)
    pending.written(30, 80)
    pending.truncated(60)
    assert pending.plan() == (TruncateTo(30), PatchRange(20, 30), AppendRange(30, 60))
    pending.noted()
    assert (pending.shipped_length, pending.kept_length, pending.changed) == (60, 60, False)


def test_a_truncation_alone_is_a_change() -> None:
    pending = Pending(100)
    pending.truncated(99)
    assert pending.changed
    assert pending.plan() == (TruncateTo(99),)


def test_a_new_journal_is_all_append() -> None:
    pending = Pending()
    pending.written(0, 7)
    assert pending.plan() == (AppendRange(0, 7),)


def test_a_hole_is_a_truncation_upwards() -> None:
    pending = Pending(10)
    pending.extended(1 << 40)
    pending.written(1 << 20, (1 << 20) + 5)
    assert pending.plan() == (TruncateTo(1 << 20), AppendRange(1 << 20, (1 << 20) + 5), TruncateTo(1 << 40))


def test_a_small_hole_is_shipped_as_zeros() -> None:
    pending = Pending(10)
    pending.written(9 + HOLE_BYTES_MIN, 5000)
    assert pending.plan() == (AppendRange(10, 5000),)


def test_what_cannot_be_is_refused() -> None:
    pending = Pending(10)
    with pytest.raises(ValueError, match="no truncation"):
        pending.truncated(11)
    with pytest.raises(ValueError, match="no extension"):
        pending.extended(9)
    with pytest.raises(ValueError, match="no range"):
        pending.written(3, 2)
    with pytest.raises(ValueError, match="at least one"):
        Pending(ranges_max=0)
    with pytest.raises(ValueError, match="slices have at least"):
        pending.slices(SLICE_BYTES_MIN - 1)


def test_patches_are_bounded() -> None:
    pending = Pending(1 << 20, ranges_max=16)
    for at in range(0, 1 << 20, 1000):
        pending.written(at, at + 1)
        assert len(pending.patched) <= 16
    covered = list(pending.patched)
    assert all(any(start <= at < end for start, end in covered) for at in range(0, 1 << 20, 1000))


def test_holes_are_bounded() -> None:
    pending = Pending(0, ranges_max=16)
    for at in range(10_000, 1 << 20, 10_000):
        pending.written(at, at + 1)
    changes = pending.plan()
    assert sum(isinstance(change, TruncateTo) for change in changes) <= 16
    assert sum(change.end - change.start for change in changes if isinstance(change, AppendRange)) < 1 << 20


def execute(changes: tuple[Change, ...], shipped: bytearray, live: bytes) -> None:
    """The plain meaning of a plan."""
    for change in changes:
        match change:
            case TruncateTo(length):
                del shipped[length:]
                shipped.extend(bytes(length - len(shipped)))
            case PatchRange(start, end):
                assert end <= len(shipped)
                shipped[start:end] = live[start:end]
            case AppendRange(start, end):
                assert start == len(shipped)
                shipped += live[start:end]


def do(call: str, start: int, end: int, mark: int, pending: Pending, live: bytearray) -> None:
    """One operation on the live file and its report."""
    if call == "write":
        if start < end:
            live.extend(bytes(max(0, start - len(live))))
            live[start:end] = bytes((mark % 255 + 1,)) * (end - start)
        pending.written(start, end)
    elif call == "truncate":
        end = min(end, len(live))
        del live[end:]
        pending.truncated(end)
    else:
        end = max(end, len(live))
        live.extend(bytes(end - len(live)))
        pending.extended(end)


def spans(largest: int) -> st.SearchStrategy[tuple[int, int]]:
    pair = st.tuples(st.integers(0, largest), st.integers(0, largest))
    return pair.map(lambda pair: (min(pair), max(pair)))


calls = st.sampled_from(["write", "write", "write", "truncate", "extend"])


@settings(reproducible, max_examples=300)
@given(
    st.integers(0, 20_000),
    st.integers(1, 4),
    st.lists(st.tuples(calls, st.one_of(spans(20_000), spans(200))), max_size=15),
)
def test_the_plan_leads_from_what_was_shipped_to_what_is(
    length: int, ranges_max: int, operations: list[tuple[str, tuple[int, int]]]
) -> None:
    live = bytearray(b"\xff" * length)
    shipped, pending = bytearray(live), Pending(length, ranges_max)
    for mark, (call, (start, end)) in enumerate(operations):
        do(call, start, end, mark, pending, live)
        assert pending.length == len(live)
        assert pending.kept_length <= min(pending.shipped_length, len(live))
        assert len(pending.patched) <= ranges_max
        result, plan = bytearray(shipped), pending.plan()
        execute(plan, result, bytes(live))
        assert result == live
        assert pending.changed == bool(plan)
        if mark % 5 == 4:
            shipped = bytearray(live)
            pending.noted()


def carried(part: Slice) -> int:
    return sum(change.end - change.start for change in part.changes if not isinstance(change, TruncateTo))


def check_slices(pending: Pending, shipped: bytearray, live: bytes, bytes_max: int) -> None:
    parts = pending.slices(bytes_max)
    for part in parts:
        assert carried(part) <= bytes_max
        execute(part.changes, shipped, live)
        assert shipped == live[: part.length_after]
    assert shipped == live
    assert all(part.length_after % SEGMENT_BYTES == 0 for part in parts[:-1])
    assert bool(parts) == pending.changed


@settings(reproducible, max_examples=60)
@given(
    st.integers(0, 5 * SEGMENT_BYTES),
    st.integers(SLICE_BYTES_MIN, 3 * SLICE_BYTES_MIN),
    st.lists(st.tuples(calls, spans(9 * SEGMENT_BYTES)), max_size=8),
)
def test_slices_are_bounded_and_end_with_segments(
    length: int, bytes_max: int, operations: list[tuple[str, tuple[int, int]]]
) -> None:
    live = bytearray(b"\xff" * length)
    shipped, pending = bytearray(live), Pending(length)
    for mark, (call, (start, end)) in enumerate(operations):
        do(call, start, end, mark, pending, live)
    check_slices(pending, shipped, bytes(live), bytes_max)


def test_slices_end_in_holes_too() -> None:
    """Many short runs between holes, each in a segment of its own, do not add up to more than a slice may carry."""
    live, pending = bytearray(), Pending()
    for number in range(30):
        start = number * SEGMENT_BYTES + 100
        do("write", start, start + SEGMENT_BYTES - HOLE_BYTES_MIN - 200, number, pending, live)
    check_slices(pending, bytearray(), bytes(live), SLICE_BYTES_MIN)


def test_patches_too_large_for_a_slice_are_shipped_as_the_rest_of_the_file() -> None:
    shipped = bytearray(b"\xff" * (6 * SEGMENT_BYTES))
    live, pending = bytearray(shipped), Pending(len(shipped))
    do("write", 500, 4 * SEGMENT_BYTES, 1, pending, live)
    assert pending.slices(SLICE_BYTES_MIN)[0].changes[0] == TruncateTo(500)
    check_slices(pending, shipped, bytes(live), SLICE_BYTES_MIN)
