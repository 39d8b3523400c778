"""Deltas of one journal after the other, without a mount: whatever was written and replaced, and whenever it was noted,
a reader that knows nothing but the deltas has the same bytes."""

import dataclasses
import os
import pathlib
import random
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import Replica

from deltapool.cas.digest import SEGMENT_BYTES
from deltapool.fs.delta import Append, Born, Delta, Keep, Truncate
from deltapool.fs.extents import SLICE_BYTES_MIN
from deltapool.fs.inode import Ino
from deltapool.fs.instant import Findings, Instant, examine
from deltapool.fs.journal import Journal
from deltapool.fs.livefile import LiveFile
from deltapool.fs.settle import reader
from deltapool.fs.ship import deltas

RANGES = 16


class File:
    """One journal with its live file, and what POSIX would show of it."""

    def __init__(self, folder: pathlib.Path, ino: int, content: bytes = b"") -> None:
        self.path = folder / str(ino)
        self.path.write_bytes(content)
        self.live = LiveFile(Ino(ino), os.open(self.path, os.O_RDWR | os.O_CLOEXEC), is_new=False)
        self.journal = Journal(Ino(ino), len(content), None, [], RANGES)
        self.journal.counts.written = self.journal.counts.changed = len(content)
        self.visible = bytearray(content)

    def write(self, offset: int, data: bytes) -> None:
        size = self.journal.overlap(offset, len(data))
        if self.journal.write(self.live, offset, data, self.live.read(offset, size) if size else b"") is None:
            self.write(offset, data)
        elif data:
            self.visible.extend(bytes(max(0, offset - len(self.visible))))
            self.visible[offset : offset + len(data)] = data

    def truncate(self, length: int) -> None:
        self.journal.truncate(self.live, length)
        del self.visible[length:]
        self.visible.extend(bytes(length - len(self.visible)))

    def close(self) -> None:
        os.close(self.live.fd)


class Volume:
    """Journals one after the other under the same name, and the reader of their deltas."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.numbers = iter(range(7, 1 << 20))
        self.files = [File(folder, next(self.numbers))]
        self.replica = Replica()
        self.slice_bytes_max = SLICE_BYTES_MIN
        self._note: tuple[File, Instant, list[Delta], Findings | None] | None = None

    @property
    def file(self) -> File:
        return self.files[-1]

    def replace(self, content: bytes) -> None:
        """A file with this content is renamed over the journal."""
        old = self.file
        old.journal.end_hold(old.live)
        new = File(self.folder, next(self.numbers), content)
        new.journal.inherit(old.journal.replaced_by(len(content)), old.journal.counts)
        self.files.append(new)

    def begin_note(self) -> None:
        self.end_note()
        if self.file.journal.wants_note:
            self._note = (self.file, self.file.journal.begin_note(1), [], None)

    def look(self) -> None:
        """What is done in a thread."""
        if self._note is None or self._note[3] is not None:
            return
        file, instant, _, _ = self._note
        read, ancestor = reader(file.live.fd), instant.ancestor
        older = None if ancestor is None else next(each for each in self.files if each.journal.ino == ancestor.ino)
        try:
            findings = examine(instant, read, None if older is None else reader(older.live.fd))
            ino, mode = file.journal.ino, 0o100644
            shipped = list(deltas(ino, mode, b"x.jsonl", instant, findings, read, self.slice_bytes_max))
        except EOFError:
            return
        self._note = (file, instant, shipped, findings)

    def end_note(self) -> None:
        self.look()
        if self._note is None:
            return
        (file, _, shipped, findings), self._note = self._note, None
        if file.journal.end_note(findings) is not None:
            self.replica.take(shipped)

    def settle(self) -> None:
        """Notes until there is nothing more, then compares."""
        self.end_note()
        self.file.journal.end_hold(self.file.live)
        while self.file.journal.wants_note:
            self.begin_note()
            self.end_note()
        content = bytes(self.file.visible)
        assert self.file.path.read_bytes() == content
        assert self.replica.bytes_of(self.file.journal.ino) == content

    def close(self) -> None:
        for file in self.files:
            file.close()


@pytest.fixture
def volume(tmp_path: pathlib.Path) -> Iterator[Volume]:
    made = Volume(tmp_path)
    yield made
    made.close()


def lines(count: int, seed: int = 0) -> bytes:
    chance = random.Random(seed)
    return b"".join(b'{"n": %d, "text": "%s"}\n' % (n, chance.randbytes(20).hex().encode()) for n in range(count))


def noted(volume: Volume) -> list[Delta]:
    """The deltas of one note."""
    before = len(volume.replica.deltas)
    volume.settle()
    return volume.replica.deltas[before:]


def test_a_new_journal_is_born_with_its_bytes(volume: Volume) -> None:
    volume.file.write(0, b"one\n")
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644)
    assert (delta.inode, delta.mtime_ns, delta.steps, delta.length_after) == (7, 1, (Append(b"one\n"),), 4)


def test_an_empty_journal_is_born_too(volume: Volume) -> None:
    (delta,) = noted(volume)
    assert delta.born is not None
    assert delta.steps == ()


def test_what_follows_is_only_what_changed(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    volume.file.write(len(lines(50)), b"more\n")
    (delta,) = noted(volume)
    assert (delta.born, delta.steps) == (None, (Append(b"more\n"),))
    assert noted(volume) == []


def test_a_replacement_is_born_of_the_old_one(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    volume.replace(lines(50) + b"more\n")
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644, parent=7, prefix_length=len(lines(50)))
    assert delta.steps == (Append(b"more\n"),)


def test_a_trimmed_replacement_keeps_the_end_of_the_old_one(volume: Volume) -> None:
    whole = lines(200)
    volume.file.write(0, whole)
    noted(volume)
    volume.replace(whole[5000:] + b"more\n")
    (delta,) = noted(volume)
    assert delta.born is not None
    assert delta.born.parent == 7
    kept, appended = delta.steps
    assert isinstance(kept, Keep)
    assert appended == Append(b"more\n")


def test_of_an_ancestor_only_what_was_noted_is_referred_to(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    volume.file.write(len(lines(50)), b"not noted\n")
    volume.file.write(1000, b"!")
    volume.replace(bytes(volume.file.visible) + b"more\n")
    (delta,) = noted(volume)
    assert delta.born is not None
    assert delta.born.prefix_length == 1000


def test_an_ancestor_that_was_never_noted_is_not_referred_to(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    volume.replace(lines(60))
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644)


def test_replacements_in_between_are_passed_over(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    for count in range(51, 60):
        volume.replace(lines(count))
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644, parent=7, prefix_length=len(lines(50)))
    assert volume.file.journal.counts.changed == len(lines(59))


def test_a_replacement_while_the_old_one_is_noted_voids_the_note(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    volume.begin_note()
    volume.look()
    volume.replace(lines(51))
    volume.end_note()
    assert volume.replica.deltas == []
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644)


def test_a_journal_that_is_renamed_while_it_is_noted_is_noted_again(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    old = volume.file.journal
    volume.files.append(File(volume.folder, next(volume.numbers), lines(51)))
    volume.begin_note()
    volume.look()
    volume.file.journal.inherit(old.replaced_by(len(lines(51))), old.counts)
    volume.end_note()
    assert len(volume.replica.deltas) == 1
    (delta,) = noted(volume)
    assert delta.born is not None
    assert delta.born.parent == 7


def test_a_writer_of_the_replaced_file_spoils_nothing(volume: Volume) -> None:
    """Who has the old file open goes on writing to it: before and after it was compared, and shorter than it was."""
    volume.file.write(0, lines(50))
    noted(volume)
    old = volume.file
    volume.replace(lines(51))
    old.write(10, b"???")
    volume.begin_note()
    volume.look()
    old.write(3, b"???")
    volume.end_note()
    assert len(volume.replica.deltas) == 1
    old.truncate(5)
    old.journal.end_hold(old.live)
    (delta,) = noted(volume)
    assert delta.born == Born(b"x.jsonl", 0o100644)


def test_records_are_bounded_and_each_is_proved(volume: Volume) -> None:
    data = random.Random(1).randbytes(5 * SEGMENT_BYTES + 77)
    volume.file.write(0, data)
    shipped = noted(volume)
    assert [delta.length_after for delta in shipped[:-1]] == [2 * SEGMENT_BYTES * n for n in (1, 2)] or len(shipped) > 2
    for delta in shipped:
        assert sum(len(step.data) for step in delta.steps if isinstance(step, Append)) <= SLICE_BYTES_MIN
    assert [delta.born is not None for delta in shipped] == [True] + [False] * (len(shipped) - 1)


def test_holes_are_not_shipped(volume: Volume) -> None:
    volume.file.write(0, b"begin\n")
    volume.file.truncate(1 << 27)
    (delta,) = noted(volume)
    assert delta.steps == (Append(b"begin\n"), Truncate(1 << 27))


def test_holes_of_a_replacement_are_not_shipped(volume: Volume) -> None:
    volume.file.write(0, lines(50))
    noted(volume)
    volume.replace(lines(50))
    volume.file.truncate(1 << 26)
    (delta,) = noted(volume)
    assert delta.born is not None
    assert delta.born.parent == 7
    assert delta.steps == (Truncate(1 << 26),)


# Everything mixed.


@dataclasses.dataclass(frozen=True)
class Act:
    what: str
    where: float
    size: int
    seed: int

    def on(self, volume: Volume, random: random.Random) -> None:
        file, chance = volume.file, random
        at, data = int(self.where * len(file.visible)), chance.randbytes(self.size)
        match self.what:
            case "append":
                file.write(len(file.visible), data)
            case "write":
                file.write(at, data)
            case "beyond":
                file.write(len(file.visible) + self.size, data)
            case "truncate":
                file.truncate(at)
            case "extend":
                file.truncate(len(file.visible) + 8 * self.size)
            case "rewrite":
                whole = bytes(file.visible) + data
                file.truncate(0)
                for start in range(0, len(whole), 5000):
                    file.write(start, whole[start : start + 5000])
            case "release":
                file.journal.end_hold(file.live)
            case "replace":
                whole = bytes(file.visible)
                volume.replace(chance.choice([whole + data, whole[at:] + data, whole[:at] + data, data]))
            case "write to an old one":
                chance.choice(volume.files).write(at, data)
            case "begin":
                volume.begin_note()
            case "look":
                volume.look()
            case "end":
                volume.end_note()
            case "settle":
                volume.settle()


ACTS = [
    *("append write beyond truncate extend rewrite release replace begin look end settle".split()),
    *("append", "write", "begin", "look", "end", "write to an old one"),
]
SIZES = st.one_of(st.integers(0, 100), st.integers(4000, 9000), st.just(700_001))
acts = st.lists(st.builds(Act, st.sampled_from(ACTS), st.floats(0, 1), SIZES, st.integers(0, 9)), max_size=40)


@settings(deadline=None, database=None, derandomize=True, max_examples=150)
@given(acts)
def test_a_reader_of_the_deltas_has_the_same_bytes(script: list[Act]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        volume = Volume(pathlib.Path(folder))
        try:
            for act in script:
                act.on(volume, random.Random(act.seed))
            volume.settle()
        finally:
            volume.close()
