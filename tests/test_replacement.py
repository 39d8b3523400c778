"""A file that is renamed over a journal: whatever is found, the new content can be made from the old one with it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.fs.fold import CANDIDATES_MAX, KEEP_BYTES_MIN, READ_BYTES, Replacement, compare_replacement

reproducible = settings(derandomize=True, database=None, deadline=None)


def compare(old: bytes, new: bytes) -> Replacement:
    found = compare_replacement(
        len(old), len(new), lambda at, size: old[at : at + size], lambda at, size: new[at : at + size]
    )
    content = old[: found.prefix]
    if found.keep is not None:
        start, length = found.keep
        assert start > found.prefix
        content += old[start : start + length]
        assert len(old[start : start + length]) == length
    assert content + new[len(new) - found.appended :] == new
    assert found.changed_bytes == found.appended
    return found


def lines(start: int, end: int) -> bytes:
    return b"".join(b'{"role": "user", "content": "message %d"}\n' % number for number in range(start, end))


def test_an_extension_appends() -> None:
    assert compare(lines(0, 50), lines(0, 51)) == Replacement(len(lines(0, 50)), None, len(lines(50, 51)))
    assert compare(b"", b"new") == Replacement(0, None, 3)
    assert compare(lines(0, 9), lines(0, 9)) == Replacement(len(lines(0, 9)), None, 0)


def test_a_shortened_file_appends_nothing() -> None:
    assert compare(lines(0, 50), lines(0, 20)) == Replacement(len(lines(0, 20)), None, 0)


def test_another_file_is_appended_whole() -> None:
    assert compare(b"a" * 5000, b"b" * 5000) == Replacement(0, None, 5000)


@pytest.mark.parametrize("appended", [b"", lines(9000, 9001), lines(9000, 9500)])
@pytest.mark.parametrize(("dropped", "count"), [(1, 10), (90, 100), (500, 2000)])
def test_a_head_trim_keeps_the_rest(dropped: int, count: int, appended: bytes) -> None:
    """Every record begins with the same words: the first bytes are common though the head is gone."""
    found = compare(lines(0, count), lines(dropped, count) + appended)
    assert found.keep is not None
    assert found.appended in (len(appended), max(0, len(appended) - len(b'{"role": "user", "content": "message ')))


def test_a_cut_in_the_middle_keeps_both_sides() -> None:
    found = compare(lines(0, 3000), lines(0, 1000) + lines(1001, 3000) + b"more\n")
    assert found.keep is not None
    assert found.appended == 5


def test_a_small_rest_is_not_worth_keeping() -> None:
    old = b"x" * 1000 + bytes(range(KEEP_BYTES_MIN - 1))
    assert compare(old, b"y" + old[1000:]).keep is None


def test_candidates_are_bounded() -> None:
    """A hostile file in which the first bytes of the new one stand everywhere, but never what follows."""
    needle = bytes(range(KEEP_BYTES_MIN)) * 64
    old, new = b"?" + (needle + b"-") * 200, needle + b"+" + needle
    reads = []

    def read_old(at: int, size: int) -> bytes:
        reads.append(size)
        return old[at : at + size]

    compare_replacement(len(old), len(new), read_old, lambda at, size: new[at : at + size])
    assert len(reads) <= 3 * (CANDIDATES_MAX + 1) + 2
    compare(old, new)


def test_what_is_kept_may_be_long() -> None:
    rng = random.Random(2)
    old = rng.randbytes(4 * READ_BYTES)
    at = 2 * READ_BYTES - 30  # every needle lies across two blocks that are read
    found = compare(old, old[at:] + b"appended")
    assert found == Replacement(0, (at, len(old) - at), 8)


def test_the_longest_match_is_taken() -> None:
    needle = random.Random(3).randbytes(4096)
    old = b"?" + needle + b"a" * 1000 + needle + b"a" * 3000 + needle + b"a" * 10 + b"!"
    start = 1 + len(needle) + 1000
    assert compare(old, needle + b"a" * 3000 + b"b" * 5000) == Replacement(0, (start, 4096 + 3000), 5000)


def test_what_stands_before_the_common_prefix_ends_is_not_kept_twice() -> None:
    """It would have to move towards the end, which a delta can't say."""
    prefix = random.Random(4).randbytes(200)
    assert compare(prefix + b"-" * 300, prefix + prefix) == Replacement(200, None, 200)


def test_a_file_that_changes_meanwhile_is_an_error() -> None:
    with pytest.raises(EOFError, match="changed while"):
        compare_replacement(10, 10, lambda at, size: b"x" * 9, lambda at, size: b"x" * 10)


@settings(reproducible, max_examples=500)
@given(
    st.lists(st.tuples(st.sampled_from(["old", "fresh"]), st.integers(0, 60), st.integers(0, 60)), max_size=4),
    st.integers(0, 60),
)
def test_the_replacement_can_be_made_from_what_was_found(parts: list[tuple[str, int, int]], count: int) -> None:
    old, new = lines(0, count), b""
    for kind, start, end in parts:
        new += lines(start, min(end, count)) if kind == "old" else lines(1000 + start, 1000 + end)
    compare(old, new)


@settings(reproducible, max_examples=300)
@given(st.text("ab", max_size=400), st.integers(0, 400), st.integers(0, 400), st.text("ab", max_size=99))
def test_repetitive_content_can_be_made_too(text: str, start: int, end: int, more: str) -> None:
    compare(text.encode(), (text[:start] + text[end:] + more).encode())
