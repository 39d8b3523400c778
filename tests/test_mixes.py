"""Mixes of what agents do to their journals, each call watched by another process (see `stage`)."""

import os
import pathlib
import random
from typing import Any

import pytest
import scenarios
from mounting import Mount
from scenarios import messages
from stage import Stage, counts, flush

from deltapool.fs.fold import common_prefix

# Mixes


def test_an_undo_through_o_trunc_costs_the_new_suffix(stage: Stage) -> None:
    lines = messages(40)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    new = [*lines[:25], b'{"role": "user", "n": 25, "changed": "entirely"}\n']
    took = stage.same(lambda call, path: scenarios.rewrite(call, path, new))
    written = len(b"".join(new))
    alike = common_prefix(b"".join(lines), b"".join(new))
    assert took == stage.journal(written, written - alike, folded=1)


def test_an_undo_that_only_shortens_costs_nothing(stage: Stage) -> None:
    lines = messages(40)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    took = stage.same(lambda call, path: scenarios.rewrite(call, path, lines[:25]))
    assert took == stage.journal(len(b"".join(lines[:25])), 0, folded=1)
    assert stage.content() == b"".join(lines[:25])


def test_a_rewrite_of_the_same_costs_nothing(stage: Stage) -> None:
    lines = messages(40)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    took = stage.same(lambda call, path: scenarios.rewrite(call, path, lines))
    assert took == stage.journal(len(b"".join(lines)), 0, folded=1)


def test_a_rewrite_by_lines_and_by_bytes_is_folded_alike(stage: Stage) -> None:
    """Bytes are compared, not chunks."""
    whole = b"".join(messages(10))
    stage.same(lambda call, path: scenarios.append(call, path, whole))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_WRONLY | os.O_TRUNC)
        for start in range(0, len(whole), 97):
            call.write(fd, whole[start : start + 97])
        call.write(fd, b"torn \0 \xff{")
        call.close(fd)

    took = stage.same(script)
    assert took == stage.journal(len(whole) + 9, 9, folded=1)
    assert stage.content() == whole + b"torn \0 \xff{"


def test_a_rewrite_through_ftruncate_on_an_appending_descriptor(stage: Stage) -> None:
    lines = messages(20)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines[:15])))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_WRONLY | os.O_APPEND)
        call.ftruncate(fd, 0)
        for line in lines:
            call.write(fd, line)
        call.close(fd)

    took = stage.same(script)
    assert took == stage.journal(len(b"".join(lines)), len(b"".join(lines[15:])), folded=1)


def test_an_fsync_in_the_middle_of_a_rewrite_ends_the_fold(stage: Stage) -> None:
    lines = messages(20)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_WRONLY | os.O_TRUNC)
        call.write(fd, b"".join(lines[:10]))
        call.fsync(fd)
        call.write(fd, b"".join(lines[10:]))
        call.close(fd)

    took = stage.same(script)
    assert took == stage.journal(len(b"".join(lines)), len(b"".join(lines[10:])), folded=1)


def test_an_edit_in_place_costs_the_bytes_that_differ(stage: Stage) -> None:
    lines = messages(100)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    whole = bytearray(b"".join(lines))
    for at in (10, 5000, len(whole) - 9):
        whole[at : at + 8] = bytes(255 - byte for byte in whole[at : at + 8])

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_RDWR)
        call.pwrite(fd, bytes(whole), 0)
        call.close(fd)

    took = stage.same(script)
    assert took == stage.journal(len(whole), 24)
    assert stage.content() == whole


def test_an_edit_through_a_mapping_costs_the_bytes_that_differ(stage: Stage) -> None:
    lines = messages(200)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    flush(stage.mounted)
    before = counts(stage.mounted)
    scenarios.edit_mapped(stage.path, 5000, b"\xff\xff\xff\xff")
    flush(stage.mounted)
    took = counts(stage.mounted) - before
    expected = bytearray(b"".join(lines))
    expected[5000:5004] = b"\xff\xff\xff\xff"
    assert stage.content() == expected
    if stage.is_journal:
        assert took.changed == took.pwritten == 4


def test_an_edit_through_a_mapping_while_a_rewrite_is_held_back(stage: Stage) -> None:
    """Pages beyond the new length are none of the file's; those within are."""
    whole = b"".join(messages(200))
    stage.same(lambda call, path: scenarios.append(call, path, whole))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_RDWR | os.O_TRUNC)
        call.write(fd, whole[:6000])
        scenarios.edit_mapped(path, 100, b"????")
        call.write(fd, whole[6000:])
        call.close(fd)

    stage.same(script)
    assert stage.content() == whole[:100] + b"????" + whole[104:]


def test_two_writers_one_at_its_own_offset(stage: Stage) -> None:
    def script(call: Any, path: str) -> None:
        first = call.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        second = call.open(path, os.O_WRONLY | os.O_APPEND)
        for number in range(5):
            call.write(first, b"first %d\n" % number)
            call.write(second, b"second and longer %d\n" % number)
        call.close(first)
        call.write(second, b"end\n")
        call.close(second)

    stage.same(script)


def test_two_writers_both_rewrite(stage: Stage) -> None:
    lines = messages(12)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))

    def script(call: Any, path: str) -> None:
        first = call.open(path, os.O_WRONLY | os.O_TRUNC)
        call.write(first, b"".join(lines[:4]))
        second = call.open(path, os.O_WRONLY | os.O_TRUNC)
        call.write(first, lines[4])  # a gap in what the second one sees
        call.write(second, b"".join(lines[:6]))
        call.close(first)
        call.write(second, lines[6])
        call.close(second)

    stage.same(script)


def test_a_rewrite_of_what_another_has_open_for_appending(stage: Stage) -> None:
    lines = messages(12)

    def script(call: Any, path: str) -> None:
        held = call.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for count in range(1, 12):
            scenarios.rewrite(call, path, lines[:count])
            call.write(held, b"from the side\n")
        call.close(held)

    stage.same(script)


def test_hard_links_show_one_file(stage: Stage) -> None:
    lines = messages(12)

    def script(call: Any, path: str) -> None:
        scenarios.s1_rewrites(call, path, lines[:6])
        call.link(path, path + ".link")
        scenarios.rewrite(call, path + ".link", lines[:8])
        fd = call.open(path, os.O_WRONLY | os.O_TRUNC)
        call.write(fd, b"".join(lines[:3]))
        call.link(path, path + ".second")  # in the middle of a rewrite
        call.write(fd, b"".join(lines[3:10]))
        call.unlink(path)
        call.close(fd)
        scenarios.append(call, path + ".link", lines[10])
        call.rename(path + ".link", path)
        call.rename(path + ".second", path)  # the same file: nothing happens
        call.unlink(path + ".second")
        scenarios.s3_replace(call, path, b"".join(lines))

    stage.same(script)


def test_a_journal_that_is_replaced_lives_on_under_its_other_name(stage: Stage) -> None:
    whole = b"".join(messages(12))

    def script(call: Any, path: str) -> None:
        scenarios.append(call, path, whole)
        call.link(path, path + ".link")
        scenarios.s3_replace(call, path, whole + b"more\n")
        scenarios.append(call, path + ".link", b"other\n")
        call.rename(path + ".link", path)

    stage.same(script)
    assert stage.content() == whole + b"other\n"


def test_a_journal_is_renamed_to_something_else_and_back(stage: Stage) -> None:
    lines = messages(20)

    def script(call: Any, path: str) -> None:
        scenarios.s1_rewrites(call, path, lines[:10])
        call.rename(path, path + ".bak")
        scenarios.rewrite(call, path + ".bak", lines[:12])
        scenarios.append(call, path + ".bak", lines[12])
        call.rename(path + ".bak", path)
        scenarios.rewrite(call, path, lines)

    took = stage.same(script)
    written = sum(len(b"".join(lines[:count])) for count in range(1, 11)) + len(b"".join(lines[:13]) + b"".join(lines))
    assert took.written + took.work_written == written
    assert os.getxattr(stage.path, "user.deltapool.class") == (b"journal" if stage.is_journal else b"work")


def test_a_rename_in_the_middle_of_a_rewrite(stage: Stage) -> None:
    lines = messages(20)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_WRONLY | os.O_TRUNC)
        call.write(fd, b"".join(lines[:5]))
        call.rename(path, path + ".old")
        call.write(fd, b"".join(lines[5:10]))
        call.rename(path + ".old", path)
        call.ftruncate(fd, 0)
        call.write(fd, b"".join(lines[:10]))
        call.close(fd)

    stage.same(script)


def test_a_replaced_file_is_still_written_to(stage: Stage) -> None:
    """Another writer has the old file open; the new one is noted although the old one shrinks."""
    whole = b"".join(messages(50))
    stage.same(lambda call, path: scenarios.append(call, path, whole))

    def script(call: Any, path: str) -> None:
        old = call.open(path, os.O_RDWR)
        scenarios.s3_replace(call, path, whole + b"more\n")
        call.pwrite(old, b"?", 7)
        call.ftruncate(old, 100)
        assert call.fstat(old).st_nlink == 0
        call.write(old, b"last words\n")
        assert call.pread(old, 1000, 0) == b"last words\n" + whole[11:100]
        call.close(old)

    stage.same(script)
    assert stage.content() == whole + b"more\n"


def test_a_truncated_journal_is_unlinked_while_it_is_open(stage: Stage) -> None:
    whole = b"".join(messages(20))
    stage.same(lambda call, path: scenarios.append(call, path, whole))

    def script(call: Any, path: str) -> None:
        fd = call.open(path, os.O_RDWR | os.O_TRUNC)
        call.write(fd, whole[:1000])
        call.unlink(path)
        call.write(fd, whole[1000:2000])
        assert call.pread(fd, 1 << 20, 0) == whole[:2000]
        call.ftruncate(fd, 5)
        assert call.pread(fd, 1 << 20, 0) == whole[:5]
        call.close(fd)

    stage.same(script)


@pytest.mark.parametrize("seed", range(4))
def test_scenarios_in_any_order_on_one_file(stage: Stage, seed: int) -> None:
    chance = random.Random(seed)
    lines = messages(30, seed=seed)
    steps = [chance.randrange(9) for _ in range(14)]
    amounts = [chance.randrange(1, 30) for _ in steps]

    def script(call: Any, path: str) -> None:
        scenarios.append(call, path, b"".join(lines[:10]))
        for number, (step, amount) in enumerate(zip(steps, amounts, strict=True)):
            size = call.stat(path).st_size
            data = b"".join(lines[:amount])
            match step:
                case 0:
                    scenarios.rewrite(call, path, lines[:amount])
                case 1:
                    scenarios.append(call, path, lines[amount])
                case 2:
                    scenarios.s3_replace(call, path, data, f"tmp{number}.jsonl")
                case 3:
                    scenarios.s3_replace(call, path, data)
                case 4:
                    scenarios.s6_head_trim(call, path, lines[amount], min(size, 700))
                case 5:
                    scenarios.s7_tail_surgery(call, path, size // 3, size // 2)
                case 6:
                    scenarios.s8_overwrite(call, path, data)
                case 7:
                    call.truncate(path, size * amount // 40)
                case 8:
                    call.rename(path, path + ".away")
                    scenarios.rewrite(call, path + ".away", lines[:amount])
                    call.rename(path + ".away", path)

    stage.same(script)


def test_many_processes_rewrite_journals_of_their_own(stage: Stage) -> None:
    flush(stage.mounted)
    before = counts(stage.mounted)
    paths = [str(stage.folder / f"{number}-{stage.name}") for number in range(3)]
    scenarios.join(*(scenarios.start("s1", path, 25, number) for number, path in enumerate(paths)))
    flush(stage.mounted)
    took = counts(stage.mounted) - before
    lines = [messages(25, seed=number) for number in range(3)]
    assert [pathlib.Path(path).read_bytes() for path in paths] == [b"".join(each) for each in lines]
    written = sum(len(b"".join(each[:count])) for each in lines for count in range(1, 26))
    assert took == stage.journal(written, sum(len(b"".join(each)) for each in lines), folded=3 * 24)


def test_all_of_it_is_there_after_a_remount(calm: Mount, tmp_path: pathlib.Path) -> None:
    """Run after the others: everything that they left behind is the same after an unmount, and fsck agrees."""
    (calm.path / "last.jsonl").write_bytes(b"".join(messages(50)))
    before = {path.relative_to(calm.path): path.read_bytes() for path in calm.path.rglob("*") if path.is_file()}
    calm.remount()
    after = {path.relative_to(calm.path): path.read_bytes() for path in calm.path.rglob("*") if path.is_file()}
    assert after == before
    assert calm.fsck() == []
