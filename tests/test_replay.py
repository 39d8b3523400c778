"""`apply` against a model that does each step plainly; and that a delta that is refused changes nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapool.cas.digest import SEGMENT_BYTES, digest_bytes
from deltapool.fs.delta import NEED_MORE, Append, Born, Decoder, Delta, Keep, Patch, Step, Truncate, encode, steps_of
from deltapool.fs.extents import Pending
from deltapool.fs.fold import Extend, Fold, Write
from deltapool.fs.replay import LENGTH_MAX, MemoryContent, ReplayMismatch, apply

reproducible = settings(derandomize=True, database=None, deadline=None)


class Watched(MemoryContent):
    """Content that counts what is read and written."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.digest()
        self.read_bytes = self.written_bytes = 0

    def read(self, offset: int, size: int) -> bytes:
        self.read_bytes = getattr(self, "read_bytes", 0) + size
        return super().read(offset, size)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.written_bytes += len(data)
        super().write(offset, data)


def plainly(content: bytes, steps: tuple[Step, ...]) -> bytes:
    """What the steps mean."""
    for step in steps:
        match step:
            case Append(data):
                content += data
            case Patch(offset, data):
                content = content[:offset] + data + content[offset + len(data) :]
            case Truncate(length):
                content = content[:length].ljust(length, b"\0")
            case Keep(at, start, length):
                content = content[:at] + content[start : start + length]
    return content


def promising(content: bytes, *steps: Step, born: Born | None = None) -> Delta:
    after = plainly(content, steps)
    return Delta(1, 0, born, steps, len(after), digest_bytes(after))


@st.composite
def runs(draw: st.DrawFn, scale: int = 1, count: int = 6) -> tuple[bytes, tuple[Step, ...]]:
    """A content, and steps that are within its bounds; lengths in units of `scale`."""

    def size(largest: int) -> int:
        return draw(st.integers(0, largest // scale)) * scale + (draw(st.integers(0, 2)) if scale > 1 else 0)

    def data(limit: int) -> bytes:
        return bytes((draw(st.integers(1, 255)),)) * min(size(20 * scale), limit)

    content = b"".join(bytes((number,)) * scale for number in range(draw(st.integers(0, 40))))
    length, steps = len(content), list[Step]()
    for _ in range(draw(st.integers(0, count))):
        match draw(st.sampled_from([Append, Patch, Truncate, Keep])):
            case kind if kind is Append:
                steps.append(Append(data(1 << 30)))
            case kind if kind is Patch:
                offset = min(size(length), length)
                steps.append(Patch(offset, data(length - offset)))
            case kind if kind is Truncate:
                steps.append(Truncate(size(length + 20 * scale)))
            case _:
                start = min(size(length), length)
                at = min(size(start), start)
                steps.append(Keep(at, start, min(size(length - start), length - start)))
        length = len(plainly(bytes(length), (steps[-1],)))
    return content, tuple(steps)


@settings(reproducible, max_examples=500)
@given(runs())
def test_apply_does_what_the_steps_mean(run: tuple[bytes, tuple[Step, ...]]) -> None:
    content = MemoryContent(run[0])
    apply(promising(*run[:1], *run[1]), content)
    assert content.data == plainly(*run)
    assert content.digest() == digest_bytes(content.data)


@settings(reproducible, max_examples=40)
@given(runs(scale=SEGMENT_BYTES // 4, count=5))
def test_digests_that_are_known_are_right(run: tuple[bytes, tuple[Step, ...]]) -> None:
    """Over several segments: what is taken as known without being read is the digest of what is there."""
    content = Watched(run[0])
    apply(promising(*run[:1], *run[1]), content)
    assert content.data == plainly(*run)
    assert content.digest() == digest_bytes(content.data)


@settings(reproducible, max_examples=200)
@given(runs())
def test_a_journal_is_born_of_the_prefix_of_another(run: tuple[bytes, tuple[Step, ...]]) -> None:
    parent, content = MemoryContent(b"parent" * 10), MemoryContent()
    begin = bytes(parent.data[: len(run[0])])  # as long as the steps expect
    apply(promising(begin, *run[1], born=Born(b"x.jsonl", 0o644, 2, len(begin))), content, parent)
    assert content.data == plainly(begin, run[1])
    assert parent.data == b"parent" * 10


def test_a_journal_is_born_of_nothing() -> None:
    content = MemoryContent()
    apply(promising(b"", Append(b"line\n"), born=Born(b"x.jsonl", 0o644)), content)
    assert content.data == b"line\n"


def refused(delta: Delta, data: bytes, reason: str, parent: MemoryContent | None = None) -> None:
    content = Watched(data)
    with pytest.raises(ReplayMismatch, match=reason):
        apply(delta, content, parent)
    assert content.data == data
    assert content.written_bytes == 0
    assert content.digest() == digest_bytes(data)


@pytest.mark.parametrize(
    "step",
    [
        Patch(8, b"xyz"),
        Patch(11, b""),
        Truncate(LENGTH_MAX + 1),
        Truncate((1 << 64) - 1),
        Keep(6, 5, 1),
        Keep(0, 5, 6),
        Keep(0, (1 << 64) - 1, (1 << 64) - 1),
    ],
)
@pytest.mark.parametrize("before", [(), (Append(b"x"), Truncate(10), Patch(0, b"!"))])
def test_a_step_out_of_bounds_changes_nothing(before: tuple[Step, ...], step: Step) -> None:
    """Nor does it allocate what a hostile length says."""
    refused(Delta(1, 0, None, (*before, step), 10, bytes(16)), b"0123456789", f"step {len(before)}, .* out of bounds")


def test_a_promise_that_is_not_kept_changes_nothing() -> None:
    steps = (Keep(0, 2, 4), Patch(1, b"!"), Append(b"tail"))
    good = promising(b"0123456789", *steps)
    refused(good, b"012345678X"[::-1], "has digest")
    refused(Delta(1, 0, None, steps, 9, good.digest_after), b"0123456789", "makes 8 bytes and promises 9")
    refused(Delta(1, 0, None, steps, 8, bytes(16)), b"0123456789", "has digest")


def test_a_delta_that_was_lost_shows_in_the_next_one() -> None:
    refused(promising(b"one\ntwo\n", Append(b"three\n")), b"one\n", "promises")
    refused(promising(b"one\ntwo\n", Truncate(4), Append(b"x")), b"0ne\n", "has digest")


def test_a_birth_that_does_not_fit_changes_nothing() -> None:
    refused(promising(b"", born=Born(b"x", 0o644)), b"there", "bytes already")
    refused(promising(b"12345", born=Born(b"x", 0o644, 2, 5)), b"", "parent that has 4", MemoryContent(b"1234"))


def test_a_parent_is_given_exactly_if_there_is_one() -> None:
    content = MemoryContent()
    cases: list[tuple[Delta, MemoryContent | None]] = [
        (promising(b""), MemoryContent()),
        (promising(b"", born=Born(b"x", 0o644)), MemoryContent()),
        (promising(b"", born=Born(b"x", 0o644, 2, 0)), None),
        (promising(b"", born=Born(b"x", 0o644, 2, 0)), content),
    ]
    for delta, parent in cases:
        with pytest.raises(ValueError, match="parent"):
            apply(delta, content, parent)


def test_an_append_reads_the_last_segment_and_writes_the_append() -> None:
    content = Watched(b"x" * (5 * SEGMENT_BYTES + 9))
    delta = promising(bytes(content.data), Append(b"line\n"))
    content.read_bytes = 0
    apply(delta, content)
    assert (content.read_bytes, content.written_bytes) == (9, 5)


def test_a_head_trim_moves_long_content_in_blocks() -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(SEGMENT_BYTES))
    content = MemoryContent(data)
    apply(promising(data, Keep(0, 1001, len(data) - 1001), Append(b"tail")), content)
    assert content.data == data[1001:] + b"tail"


class Shrunk(MemoryContent):
    def read(self, offset: int, size: int) -> bytes:
        return super().read(offset, size)[:-1]


def test_content_that_does_not_deliver_is_an_error_of_its_own() -> None:
    with pytest.raises(EOFError):
        apply(promising(b"0123", Append(b"x")), Shrunk(b"0123"))


# A journal's whole life: folded, noted, shipped, replayed


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "rewrite", "patch", "truncate", "ship"]), st.integers(0, 300), st.binary(max_size=60)
    ),
    max_size=30,
)


class Live:
    """A live file with its fold and what is pending, as a journal has them."""

    def __init__(self) -> None:
        self.content, self.fold, self.pending = MemoryContent(), Fold(0), Pending()

    def write(self, offset: int, data: bytes) -> None:
        plan = self.fold.write(offset, data, self.content.read(offset, self.fold.overlap_bytes(offset, len(data))))
        for action in plan.actions:
            if isinstance(action, Write):
                self.content.write(action.offset, data[action.start : action.end])
                self.pending.written(action.offset, action.offset + action.end - action.start)
            else:
                self.resize(action.length, longer=isinstance(action, Extend))
        if plan.again:
            self.write(offset, data)

    def truncate(self, length: int) -> None:
        for action in self.fold.truncate(length).actions:
            assert not isinstance(action, Write)
            self.resize(action.length, longer=isinstance(action, Extend))

    def release(self) -> None:
        for action in self.fold.release().actions:
            assert not isinstance(action, Write)
            self.resize(action.length, longer=False)

    def resize(self, length: int, *, longer: bool) -> None:
        self.content.truncate(length)
        (self.pending.extended if longer else self.pending.truncated)(length)

    def ship(self) -> bytes:
        self.release()
        steps = steps_of(self.pending.plan(), self.content.read)
        self.pending.noted()
        return encode(Delta(1, 0, None, steps, self.content.length, self.content.digest()))


@settings(reproducible, max_examples=300)
@given(operations)
def test_what_was_shipped_is_what_is_replayed(calls: list[tuple[str, int, bytes]]) -> None:
    live, remote, decoder = Live(), MemoryContent(), Decoder()
    for call, at, data in [*calls, ("ship", 0, b"")]:
        match call:
            case "append":
                live.write(live.fold.visible_length, data)
            case "rewrite":
                content = live.content.read(0, live.fold.visible_length)
                live.truncate(0)
                live.write(0, content + data)
            case "patch":
                live.write(at, data)
            case "truncate":
                live.truncate(at)
            case _:
                decoder.feed(live.ship())
                delta = decoder.next()
                assert delta is not NEED_MORE
                apply(delta, remote)
                assert remote.data == live.content.data
