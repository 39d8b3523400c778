"""What agents do to their journals, S1 to S8, each call watched by another process (see `stage`)."""

import os
from typing import Any

import pytest
import scenarios
from scenarios import messages
from stage import Stage, counts, flush

from deltapool.fs.fold import common_prefix

# S1 to S8


def test_s1_a_rewrite_for_each_message_costs_its_message(stage: Stage) -> None:
    lines = messages(30, 2000)
    took = stage.same(lambda call, path: scenarios.s1_rewrites(call, path, lines))
    written = sum(len(b"".join(lines[:count])) for count in range(1, 31))
    assert took == stage.journal(written, len(b"".join(lines)), folded=29)


def test_s2_a_checked_append_costs_its_line(stage: Stage) -> None:
    lines = messages(20)
    stage.same(lambda call, path: scenarios.append(call, path, lines[0]))
    took = stage.same(lambda call, path: [scenarios.s2_checked_append(call, path, line) for line in lines[1:]])
    appended = len(b"".join(lines[1:]))
    assert took == stage.journal(appended, appended)


@pytest.mark.parametrize("temporary", ["tmpa1b2c3d4", ".tmp-5.jsonl"])
def test_s3_a_replacement_costs_its_difference(stage: Stage, temporary: str) -> None:
    lines = messages(60)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines[:50])))
    whole = b"".join(lines)
    took = stage.same(lambda call, path: scenarios.s3_replace(call, path, whole, temporary))
    appended = len(b"".join(lines[50:]))
    assert took.written + took.work_written == took.pwritten == len(whole)
    if stage.is_journal:
        assert (took.work_written, took.changed, took.folded) == (0, appended, 1)
    else:
        assert took.folded == 0
        assert took.changed == took.written  # of the temporary file, as long as it was called a journal


def test_s3_many_replacements_between_two_notes_cost_their_difference(stage: Stage) -> None:
    lines = messages(60)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines[:50])))

    def script(call: Any, path: str) -> None:
        for count in range(51, 61):
            scenarios.s3_replace(call, path, b"".join(lines[:count]))

    took = stage.same(script)
    written = sum(len(b"".join(lines[:count])) for count in range(51, 61))
    assert took.written + took.work_written == written
    assert took.changed == (len(b"".join(lines[50:])) if stage.is_journal else 0)


def test_s3_a_replacement_of_a_trimmed_journal_costs_what_is_new(stage: Stage) -> None:
    """The beginnings of lines are alike, so a few bytes of the kept ones may count as new."""
    lines = messages(200)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    trimmed = b"".join(lines[100:]) + b"new\n"
    took = stage.same(lambda call, path: scenarios.s3_replace(call, path, trimmed))
    if stage.is_journal:
        assert 4 <= took.changed <= 4 + common_prefix(lines[0], lines[100]) + len(lines[100])


def test_s4_two_processes_append_unlocked(stage: Stage) -> None:
    flush(stage.mounted)
    before = counts(stage.mounted)
    scenarios.join(*(scenarios.start("s4", stage.path, writer, 40) for writer in (1, 2)))
    flush(stage.mounted)
    took = counts(stage.mounted) - before
    found = stage.content().splitlines(keepends=True)
    for writer in (1, 2):
        mine = [line for line in found if line.startswith(b'{"writer": %d,' % writer)]
        assert b"".join(mine) == b"".join(scenarios.batches(writer, 40))
    size = len(b"".join(found))
    assert size == sum(len(b"".join(scenarios.batches(writer, 40))) for writer in (1, 2))
    assert took == stage.journal(size, size)


def test_s4_one_process_sees_what_is_expected(stage: Stage) -> None:
    batches = scenarios.batches(3, 8)
    took = stage.same(lambda call, path: scenarios.s4_batches(call, path, batches))
    assert took == stage.journal(len(b"".join(batches)), len(b"".join(batches)))


def test_s5_a_held_open_writer_and_its_readers(stage: Stage) -> None:
    lines = messages(15)
    took = stage.same(lambda call, path: scenarios.s5_held_open(call, path, lines))
    assert took == stage.journal(len(b"".join(lines)), len(b"".join(lines)))


def test_s5_a_follower_in_another_process_misses_nothing(stage: Stage) -> None:
    os.close(os.open(stage.path, os.O_WRONLY | os.O_CREAT))
    scenarios.join(scenarios.start("follow", stage.path, 300), scenarios.start("s5", stage.path, 300))
    assert stage.content() == b"".join(messages(300))


def test_s6_a_head_trim_costs_at_most_what_is_kept(stage: Stage) -> None:
    """In place the kept tail moves: nearly every byte of it really changes on disk."""
    lines = messages(50)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    keep = len(b"".join(lines[40:])) + 4
    took = stage.same(lambda call, path: scenarios.s6_head_trim(call, path, b"new\n", keep))
    if not stage.is_journal:
        assert took == stage.journal(4 + keep, 0)
        return
    alike = common_prefix(lines[0], lines[40])
    assert took == stage.journal(4 + keep, 4 + keep - alike, folded=1)


def test_s7_tail_surgery_costs_at_most_what_follows(stage: Stage) -> None:
    """The file really ends at the removed line for a moment: what follows it is new."""
    lines = messages(50)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    start, end = len(b"".join(lines[:44])), len(b"".join(lines[:45]))
    took = stage.same(lambda call, path: scenarios.s7_tail_surgery(call, path, start, end))
    rest = len(b"".join(lines[45:]))
    assert took == stage.journal(rest, rest)


@pytest.mark.parametrize("kept", [10, 30, 50])
def test_s8_an_overwrite_and_trim_costs_its_difference(stage: Stage, kept: int) -> None:
    lines = messages(40)
    stage.same(lambda call, path: scenarios.append(call, path, b"".join(lines)))
    data = b"".join(messages(50)[:kept])
    took = stage.same(lambda call, path: scenarios.s8_overwrite(call, path, data))
    assert took == stage.journal(len(data), max(0, len(data) - len(b"".join(lines))))


def test_s8_two_processes_share_a_mapping_under_a_lock(stage: Stage) -> None:
    scenarios.join(*(scenarios.start("s8", stage.path, 20, turn) for turn in (0, 1)))
    found = stage.content()
    assert len(found) == 32768
    assert found[:8] == (20).to_bytes(8, "big")
    assert found[4096:4116] == bytes([1, 2] * 10)
    flush(stage.mounted)
