"""Folding, against a model that is a plain file: readers see POSIX, and the live file is the old content or the new."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.fs.fold import (
    GAP_BYTES_MIN,
    NOTHING,
    READ_BYTES,
    Extend,
    Fold,
    Plan,
    Truncate,
    Write,
    common_prefix,
    diff,
)

reproducible = settings(derandomize=True, database=None, deadline=None)


# Comparing


def test_equal_bytes_do_not_differ() -> None:
    assert diff(b"", b"") == ([], 0)
    assert diff(b"same", memoryview(b"same")) == ([], 0)


def test_runs_with_few_equal_bytes_between_them_are_one() -> None:
    old = bytearray(100)
    new = bytearray(old)
    for at in (10, 10 + GAP_BYTES_MIN, 50, 51 + GAP_BYTES_MIN):
        new[at] = 1
    assert diff(bytes(old), bytes(new)) == ([(10, 11 + GAP_BYTES_MIN), (50, 51), (51 + GAP_BYTES_MIN, 68)], 4)


def test_a_run_crosses_blocks() -> None:
    old = bytes(3 * 4096)
    new = bytearray(old)
    for at in (4095, 4096 + GAP_BYTES_MIN - 2, 8191, 8192):
        new[at] = 1
    assert diff(old, bytes(new)) == ([(4095, 4111), (8191, 8193)], 4)


def test_the_last_run_takes_the_rest() -> None:
    old = bytes(100_000)
    new = bytearray(old)
    new[::1000] = b"\1" * 100
    assert diff(old, bytes(new), runs_max=2) == ([(0, 1), (1000, 99_001)], 100)


def test_lengths_must_be_equal() -> None:
    with pytest.raises(ValueError, match="can't compare"):
        diff(b"1", b"22")


@st.composite
def edited(draw: st.DrawFn, size_max: int = 12_000) -> tuple[bytes, bytes]:
    """Two contents of one length that differ in a few places."""
    old = draw(st.integers(0, size_max)) * b"\0"
    new = bytearray(old)
    for at, data in draw(st.lists(st.tuples(st.integers(0, size_max), st.binary(max_size=40)), max_size=8)):
        end = min(at + len(data), len(new))
        new[at:end] = data[: max(0, end - at)]
    return old, bytes(new)


@settings(reproducible, max_examples=300)
@given(edited(), st.integers(1, 5))
def test_runs_cover_what_differs_and_no_more(contents: tuple[bytes, bytes], runs_max: int) -> None:
    old, new = contents
    different = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    runs, count = diff(old, new)
    assert count == len(different)
    assert all(any(start <= at < end for start, end in runs) for at in different)
    assert all(old[start] != new[start] and old[end - 1] != new[end - 1] for start, end in runs)
    assert all(one[1] + GAP_BYTES_MIN <= other[0] for one, other in itertools.pairwise(runs))
    fewer, count = diff(old, new, runs_max)
    assert count == len(different)
    if len(runs) <= runs_max:
        assert fewer == runs
    else:
        assert fewer == [*runs[: runs_max - 1], (runs[runs_max - 1][0], runs[-1][1])]


@settings(reproducible, max_examples=300)
@given(edited(), st.binary(max_size=9), st.binary(max_size=9))
def test_the_common_prefix_is_the_longest(contents: tuple[bytes, bytes], more: bytes, other: bytes) -> None:
    one, two = contents[0] + more, contents[1] + other
    length = common_prefix(one, two)
    assert one[:length] == two[:length]
    assert length == min(len(one), len(two)) or one[length] != two[length]


def test_a_difference_behind_the_first_block_read_is_found() -> None:
    one = bytearray(3 * READ_BYTES)
    two = bytearray(one)
    two[2 * READ_BYTES + 5000] = 1
    assert common_prefix(bytes(one), bytes(two)) == 2 * READ_BYTES + 5000


# One open journal


@dataclass
class Rig:
    """A live file under a fold beside the model: a file that does what it is told at once."""

    live: bytearray
    model: bytearray = field(init=False)
    fold: Fold = field(init=False)
    written_bytes: int = 0
    cut: Plan = NOTHING  # what the last write had cut off before

    def __post_init__(self) -> None:
        self.model = bytearray(self.live)
        self.fold = Fold(len(self.live))

    def write(self, offset: int, data: bytes) -> Plan:
        seen = bytes(self.model)
        plan, self.cut = self.ask(offset, data), NOTHING
        if plan.again:
            new = bytearray(seen)
            overwrite(new, offset, data)
            assert plan.changed_bytes == 0
            self.cut = self.run(plan, bytes(new))
            plan = self.ask(offset, data)
            assert not any(isinstance(action, Truncate) for action in plan.actions)
        assert not plan.again
        overwrite(self.model, offset, data)
        return self.run(plan, seen, data)

    def ask(self, offset: int, data: bytes) -> Plan:
        old = bytes(self.live[offset : offset + self.fold.overlap_bytes(offset, len(data))])
        return self.fold.write(offset, data, old)

    def truncate(self, length: int) -> Plan:
        seen = bytes(self.model)
        resize(self.model, length)
        return self.run(self.fold.truncate(length), seen)

    def release(self) -> Plan:
        plan = self.run(self.fold.release(), bytes(self.model))
        assert self.fold.held_at is None
        assert self.live == self.model
        return plan

    def run(self, plan: Plan, seen: bytes, data: bytes = b"") -> Plan:
        """`seen` is what readers saw before, or are to see later."""
        before = bytes(self.live)
        for action in plan.actions:
            match action:
                case Truncate(length):
                    assert length < len(self.live)
                    resize(self.live, length)
                    assert self.live in (self.model[:length], seen[:length]), "a crash would find a mixture"
                case Extend(length):
                    assert length > len(self.live)
                    resize(self.live, length)
                case Write(offset, start, end):
                    self.live.extend(bytes(max(0, offset - len(self.live))))
                    self.live[offset : offset + end - start] = data[start:end]
                    self.written_bytes += end - start
        if self.fold.held_at is not None:
            assert plan.again or self.live == before, "held, and yet the live file was touched"
            assert self.fold.held_at < len(self.live)
        assert self.fold.length == len(self.live)
        assert self.fold.visible_length == len(self.model)
        assert self.live[: len(self.model)] == self.model
        return plan


def overwrite(content: bytearray, offset: int, data: bytes) -> None:
    if data:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


def resize(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


def test_an_append_is_one_write() -> None:
    rig = Rig(bytearray(b"one\n"))
    assert rig.write(4, b"two\n") == Plan((Write(4, 0, 4),), 4)


def test_a_write_that_changes_nothing_is_not_a_change() -> None:
    rig = Rig(bytearray(b"one\ntwo\n"))
    assert rig.write(0, b"one\ntwo\n") == NOTHING
    assert rig.write(3, b"") == rig.write(30, b"") == NOTHING


def test_in_place_only_the_differing_runs_are_written() -> None:
    rig = Rig(bytearray(b"a" * 100))
    data = b"a" * 10 + b"b" + b"a" * 50 + b"c" + b"a" * 38 + b"more"
    assert rig.write(0, data) == Plan((Write(10, 10, 11), Write(61, 61, 62), Write(100, 100, 104)), 6)


def test_a_gap_is_a_hole_and_no_change_that_was_passed() -> None:
    rig = Rig(bytearray(b"a"))
    assert rig.write(10, b"b") == Plan((Write(10, 0, 1),), 1)
    assert rig.truncate(20) == Plan((Extend(20),))
    assert rig.truncate(5) == Plan((Truncate(5),))
    assert rig.truncate(5) == NOTHING


def test_a_truncation_to_nothing_is_held_back() -> None:
    rig = Rig(bytearray(b"old content\n"))
    assert rig.truncate(0) == NOTHING
    assert (rig.fold.held_at, rig.fold.visible_length) == (0, 0)
    assert rig.write(0, b"old ") == NOTHING
    assert rig.write(1, b"ld") == NOTHING  # written again, below the cursor
    assert rig.fold.visible_length == 4
    assert rig.write(4, b"context\n") == Plan((Write(9, 5, 8),), 3)
    assert rig.cut.actions == (Truncate(9),)
    assert rig.fold.held_at is None


def test_nothing_is_held_back_of_an_empty_file() -> None:
    rig = Rig(bytearray())
    assert rig.truncate(0) == NOTHING
    assert rig.fold.held_at is None


def test_the_hold_ends_where_the_old_content_ends() -> None:
    rig = Rig(bytearray(b"old"))
    rig.truncate(0)
    assert rig.write(0, b"old") == NOTHING
    assert rig.fold.held_at is None
    rig.truncate(0)
    assert rig.write(0, b"old and new") == Plan((Write(3, 3, 11),), 8)


def test_release_drops_what_was_not_written_again() -> None:
    rig = Rig(bytearray(b"old content\n"))
    rig.truncate(0)
    rig.write(0, b"old ")
    assert rig.release() == Plan((Truncate(4),))
    assert rig.release() == NOTHING
    rig.truncate(0)
    assert rig.release() == Plan((Truncate(0),))


def test_a_gap_ends_the_hold() -> None:
    rig = Rig(bytearray(b"old content\n"))
    rig.truncate(0)
    rig.write(0, b"old ")
    assert rig.write(6, b"n") == Plan((Write(6, 0, 1),), 1)
    assert rig.cut.actions == (Truncate(4),)
    assert rig.live == b"old \0\0n"


def test_a_difference_below_the_cursor_ends_the_hold_at_the_cursor() -> None:
    """Were it patched while held, a crash would find a file that is neither the old one nor the new one."""
    rig = Rig(bytearray(b"old content\n"))
    rig.truncate(0)
    rig.write(0, b"old c")
    assert rig.write(0, b"o1d cx") == Plan((Write(1, 1, 6),), 2)
    assert rig.cut.actions == (Truncate(5),)


def test_the_hold_goes_on_while_what_differs_is_cut_off() -> None:
    """Nobody sees a byte of a write that has not been accepted yet."""
    fold = Fold(12)
    fold.truncate(0)
    fold.write(0, b"old ", b"old ")
    assert fold.write(4, b"context\n", b"content\n") == Plan((Truncate(9),), again=True)
    assert (fold.length, fold.held_at, fold.visible_length) == (9, 4, 4)
    assert fold.write(4, b"context\n", b"conte") == Plan((Write(9, 5, 8),), 3)
    assert (fold.length, fold.held_at) == (12, None)


def test_truncations_while_held_move_the_cursor_back() -> None:
    rig = Rig(bytearray(b"old content\n"))
    rig.truncate(0)
    rig.write(0, b"old c")
    assert rig.truncate(5) == NOTHING
    assert rig.fold.held_at == 5
    assert rig.truncate(3) == NOTHING
    assert rig.fold.held_at == 3
    assert rig.truncate(0) == NOTHING
    rig.write(0, b"old c")
    assert rig.truncate(8) == Plan((Truncate(5), Extend(8)))


def test_a_failed_truncation_leaves_the_hold() -> None:
    """The old bytes were hidden, and stay so."""
    fold = Fold(10)
    fold.truncate(0)
    fold.write(0, b"abc", b"abc")
    fold.release()
    fold.reset(10)
    assert (fold.length, fold.held_at) == (10, 3)
    assert fold.write(3, b"x", b"d").again
    fold.write(3, b"x", b"")
    fold.reset(3)  # truncated, but not written
    assert (fold.length, fold.held_at) == (3, None)


def test_a_failed_write_leaves_the_real_length() -> None:
    fold = Fold(10)
    fold.write(10, b"abc", b"")
    fold.reset(11)
    assert (fold.length, fold.visible_length) == (11, 11)


def test_what_cannot_be_is_refused() -> None:
    fold = Fold(10)
    for offset, old in ((-1, b"x"), (0, b""), (9, b"xx")):
        with pytest.raises(ValueError, match="old bytes"):
            fold.write(offset, b"xx", old)
    with pytest.raises(ValueError, match="no length"):
        fold.truncate(-1)


few = st.text("ab", max_size=60).map(str.encode)
sizes = st.integers(0, 70)
random_operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), sizes, few),
        st.tuples(st.sampled_from(["again", "same", "append"]), sizes, few),
        st.tuples(st.sampled_from(["truncate", "reopen", "release"]), sizes, st.just(b"")),
    ),
    max_size=25,
)


@settings(reproducible, max_examples=500)
@given(few, random_operations)
def test_readers_see_posix_and_a_crash_finds_old_or_new(old: bytes, operations: list[tuple[str, int, bytes]]) -> None:
    """Rig.run asserts it after every plan: live[:visible] is the model, and while held nothing was touched."""
    rig = Rig(bytearray(old))
    for call, at, data in operations:
        match call:
            case "write":
                rig.write(at, data)
            case "again":  # what was there, from the cursor on: the usual rewrite
                cursor = len(rig.model)
                rig.write(cursor, bytes(rig.live[cursor : cursor + at]) + data[:2])
            case "same":  # what is visible anyway
                rig.write(at, bytes(rig.model[at : at + len(data)]))
            case "append":
                rig.write(len(rig.model), data)
            case "truncate":
                rig.truncate(at)
            case "reopen":
                rig.truncate(0)
            case _:
                rig.release()
    rig.release()


@settings(reproducible, max_examples=300)
@given(few, few, few, st.lists(st.integers(1, 20), min_size=1, max_size=10), st.booleans())
def test_changed_bytes_are_exact(kept: bytes, old: bytes, new: bytes, chunks: list[int], truncated: bool) -> None:
    """A rewrite from the beginning, in chunks, changes what differs from the first difference on, or exactly where."""
    rig = Rig(bytearray(kept + old))
    if truncated:
        rig.truncate(0)
    content, at, changed = kept + new, 0, 0
    for size in chunks:
        changed += rig.write(at, content[at : at + size]).changed_bytes
        at = min(at + size, len(content))
    prefix = common_prefix(content[:at], kept + old)
    differing = sum(a != b for a, b in zip(content[:at], kept + old, strict=False))
    assert changed == (at - prefix if truncated else differing + max(0, at - len(kept + old)))
    if truncated:
        assert rig.written_bytes == changed


def rewrites(rng: random.Random) -> Iterator[list[bytes]]:
    """Each message rewrites the whole file (scenario S1), in chunks that differ from one time to the next."""
    lines = [b'{"role": "system", "content": "' + b"x" * 9000 + b'"}\n']
    for number in range(40):
        lines.append(b'{"role": "user", "content": "%d %s"}\n' % (number, b"y" * rng.randrange(900)))
        content, chunks = b"".join(lines), []
        while content:
            size = rng.choice((8192, 16_638, 1, rng.randrange(1, 20_000)))
            chunks.append(content[:size])
            content = content[size:]
        yield chunks


def test_whole_rewrites_write_what_was_added_and_no_more() -> None:
    rig, written, passed = Rig(bytearray()), 0, 0
    for chunks in rewrites(random.Random(1)):
        rig.truncate(0)
        for chunk in chunks:
            written += rig.write(len(rig.model), chunk).changed_bytes
            passed += len(chunk)
        assert rig.release() == NOTHING
    assert written == rig.written_bytes == len(rig.live)
    assert passed > 10 * written


def test_an_overwrite_without_truncation_writes_what_differs() -> None:
    """Scenario S8: write from the beginning, then ftruncate to the new length."""
    rig = Rig(bytearray(b"".join(b'{"n": %d, "same": "words"}\n' % n for n in range(1000, 1100))))
    data = bytes(rig.model).replace(b'"n": 1050', b'"n": 1150')[:-30]
    assert rig.write(0, data).changed_bytes == 1
    assert rig.truncate(len(data)) == Plan((Truncate(len(data)),))


def test_tail_surgery_writes_what_follows_the_cut() -> None:
    """Scenario S7: truncate where a line begins, write back what followed it."""
    rig = Rig(bytearray(b"".join(b"line %d\n" % n for n in range(1000))))
    rest = bytes(rig.model[8008:])
    assert rig.truncate(8000) == Plan((Truncate(8000),))
    assert rig.write(8000, rest) == Plan((Write(8000, 0, len(rest)),), len(rest))
