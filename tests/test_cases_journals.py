"""The field cases about journals and agents' state files (1 to 8): real reports, each tried on the mount.

The number in a test's name is that of the case. Sizes are scaled down unless --full is given. Where a report asks what
ext4 does, the same runs on a plain folder.
"""

import json
import mmap
import os
import pathlib
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mounting import Mount, deltapool, run, wait_for_end, wait_until
from processes import Flag, running, together

from deltapool.fs import control

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
WRITERS = 8
MIB = 1 << 20


def ask(mount: Mount, command: str) -> dict[str, Any]:
    answer: dict[str, Any] = control.call(mount.state, command, 120)
    return answer


def record(writer: int, number: int, size: int) -> bytes:
    """One line of JSON, exactly `size` bytes long."""
    bare = json.dumps({"writer": writer, "number": number, "fill": ""})
    return json.dumps({"writer": writer, "number": number, "fill": "x" * (size - len(bare) - 1)}).encode() + b"\n"


def sizes(writer: int, count: int) -> list[int]:
    """From 100 bytes to 300 kB, as many small ones as large ones on a logarithmic scale."""
    chance = random.Random(writer)
    return [int(100 * 3000 ** chance.random()) for _ in range(count)]


def append(path: pathlib.Path, data: bytes) -> None:
    fd = os.open(path, APPENDING, 0o600)
    assert os.write(fd, data) == len(data)
    os.close(fd)


def test_case_01_lines_of_eight_appending_processes_stay_whole(folder: pathlib.Path, full: bool) -> None:
    path, count = folder / "session.jsonl", 500 if full else 20

    def work(writer: int) -> None:
        for number, size in enumerate(sizes(writer, count)):
            append(path, record(writer, number, size))

    together(*(lambda writer=writer: work(writer) for writer in range(WRITERS)))
    lines = path.read_bytes().splitlines(keepends=True)
    seen: dict[int, int] = dict.fromkeys(range(WRITERS), 0)
    for line in lines:
        parsed = json.loads(line)
        writer, number = parsed["writer"], parsed["number"]
        assert number == seen[writer]
        assert len(line) == sizes(writer, count)[number]
        seen[writer] += 1
    assert set(seen.values()) == {count}


def test_case_01_each_half_of_a_record_that_is_written_in_two_stays_whole(folder: pathlib.Path, full: bool) -> None:
    """Halves of different writers may stand between each other, as on any filesystem; no half is ever divided."""
    path, count = folder / "session.jsonl", 500 if full else 10

    def work(writer: int) -> None:
        fd = os.open(path, APPENDING, 0o600)
        for number, size in enumerate(sizes(writer, count)):
            for half in range(2):
                os.write(fd, b"<%d:%d:%d:%s>" % (writer, number, half, b"x" * size))

    together(*(lambda writer=writer: work(writer) for writer in range(WRITERS)))
    content = path.read_bytes()
    halves = re.findall(rb"<(\d+):(\d+):(\d+):(x+)>", content)
    assert sum(len(b"".join(half)) + 5 for half in halves) == len(content)
    for writer in range(WRITERS):
        own = [(int(half[1]), int(half[2]), len(half[3])) for half in halves if int(half[0]) == writer]
        assert own == [(number, half, size) for number, size in enumerate(sizes(writer, count)) for half in range(2)]


def stream(writer: int) -> Iterator[bytes]:
    chance = random.Random(writer)
    number = 0
    while True:
        yield record(writer, number, chance.randrange(100, 9000))
        number += 1


def test_case_02_no_run_of_nuls_after_an_append_was_interrupted(shared: Mount, folder: pathlib.Path) -> None:
    """The daemon is killed while two agents append, one with a descriptor held open, one with a new one each time."""

    def work(writer: int) -> int:
        """The bytes acknowledged: the last write may be a short one."""
        fd, acknowledged = os.open(folder / names[writer], APPENDING, 0o600), 0
        for line in stream(writer):
            try:
                if writer:
                    os.close(fd)
                    fd = os.open(folder / names[writer], APPENDING)
                acknowledged += os.write(fd, line)
            except OSError:
                return acknowledged
        return 0

    def grown() -> bool:
        return all((folder / name).exists() and (folder / name).stat().st_size > 300_000 for name in names)

    names = ["0.jsonl", "1.jsonl"]
    with running(lambda: work(0), lambda: work(1)) as children:
        wait_until(grown, "two journals of 300 kB")
        shared.kill()
        acknowledged = [child.wait() for child in children]
    shared.start()
    for writer, name in enumerate(names):
        content = (folder / name).read_bytes()
        assert b"\0" not in content
        assert len(content) >= acknowledged[writer] >= 300_000
        lines = stream(writer)
        written = b""
        while len(written) < len(content):
            written += next(lines)
        assert written.startswith(content)


def test_case_03_a_record_torn_by_a_killed_writer_is_kept_as_it_is(shared: Mount, folder: pathlib.Path) -> None:
    path, half_way = folder / "session.jsonl", Flag()

    def torn() -> None:
        fd = os.open(path, APPENDING, 0o600)
        os.write(fd, b'{"text": "the first half')
        half_way.set()
        signal.pause()

    with running(torn) as (child,):
        wait_until(lambda: half_way, "the first half of a record")
        child.kill()
    append(path, b'{"text": "the next record"}\n')
    wanted = b'{"text": "the first half{"text": "the next record"}\n'
    assert path.read_bytes() == wanted
    ask(shared, "flush")
    assert path.read_bytes() == wanted
    (listed,) = [each for each in ask(shared, "journals")["journals"] if each["path"].startswith(folder.name)]
    assert (listed["bytes"], listed["lines"]) == (len(wanted), 1)
    assert listed["bytes_written"] == listed["bytes_changed"] == len(wanted)


def test_case_04_a_journal_cut_anywhere_comes_back_to_the_byte(shared: Mount, folder: pathlib.Path) -> None:
    """Slices of 4096 bytes, each fsynced, end in the middle of lines and of characters."""
    chance = random.Random(4)
    text = "".join(json.dumps({"text": chance.choice("aé漢😀") * 700}, ensure_ascii=False) + "\n" for _ in range(40))
    content = text.encode()
    written = {}
    for number in range(4):
        path = folder / f"{number}.jsonl"
        fd = os.open(path, APPENDING, 0o600)
        slices = chance.randrange(3, len(content) // 4096)
        for index in range(slices):
            os.write(fd, content[index * 4096 : (index + 1) * 4096])
            os.fsync(fd)
        os.close(fd)
        written[path] = content[: slices * 4096]
    assert any(bytes_are_torn(each) for each in written.values())
    shared.crash()
    assert {path: path.read_bytes() for path in written} == written
    ask(shared, "flush")
    assert {path: path.read_bytes() for path in written} == written


def bytes_are_torn(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def figures(pid: int, name: str, key: str) -> int:
    found = re.search(rf"^{key}:\s*(\d+)", pathlib.Path(f"/proc/{pid}/{name}").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_case_05_a_huge_journal_costs_what_is_added_to_it(shared: Mount, folder: pathlib.Path, full: bool) -> None:
    """3 GB with --full, 200 MB otherwise: what is asked for does not depend on it."""
    path, megabytes, pid = folder / "session.jsonl", 3000 if full else 200, shared.pid
    line = record(0, 0, 1000)
    block = line * 1000
    with open(path, "wb", buffering=0) as file:
        file.writelines(block for _ in range(megabytes))
    ask(shared, "flush")
    resident = figures(pid, "status", "VmRSS")
    before, read = ask(shared, "status"), figures(pid, "io", "rchar")

    def cost(change: Callable[[], object]) -> tuple[int, int, int]:
        """Bytes changed, bytes written to the live file, and whether less than 8 MiB were read, requests included."""
        nonlocal before, read
        change()
        ask(shared, "flush")
        after, now = ask(shared, "status"), figures(pid, "io", "rchar")
        answer = (
            after["journals"]["bytes_changed"] - before["journals"]["bytes_changed"],
            after["live"]["bytes_pwritten"] - before["live"]["bytes_pwritten"],
            int(now - read < 8 * MIB),
        )
        before, read = after, now
        return answer

    def change_one_byte() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.seek(megabytes * 500_000)
            file.write(b"[")

    assert cost(lambda: append(path, line)) == (1000, 1000, 1)
    assert cost(change_one_byte) == (1, 1, 1)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert cost(lambda: run(["tail", "-c", "64k", path])) == (0, 0, 1)
    assert run(["wc", "-l", path]).split()[0] == str(megabytes * 1000 + 1)
    assert figures(pid, "status", "VmRSS") - resident < 32 * 1024, "memory follows the size of the journal"
    path.unlink()


def test_case_06_an_old_descriptor_overwrites_at_its_own_offset(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def play(place: pathlib.Path) -> tuple[bytes, int]:
        path = place / "events.jsonl"
        path.write_bytes(b'{"event": 1}\n')
        old = os.open(path, os.O_WRONLY)
        os.lseek(old, 0, os.SEEK_END)
        together(lambda: append(path, b'{"event": 2, "by": "the other process"}\n'))
        os.write(old, b'{"event": 2}\n')
        together(lambda: append(path, b'{"event": 3}\n'))
        os.write(old, b'{"event": 4}\n')
        size = os.fstat(old).st_size
        os.close(old)
        return path.read_bytes(), size

    assert play(folder) == play(tmp_path)


@pytest.mark.parametrize("end", ["SIGTERM", "umount", "umount -l"])
def test_case_07_what_was_never_fsynced_survives_a_clean_end(shared: Mount, folder: pathlib.Path, end: str) -> None:
    content = {folder / name: name.encode() * 5000 for name in ("today.jsonl", "note.txt", "empty")}
    content[folder / "empty"] = b""
    pid = shared.pid
    for path, data in content.items():
        append(path, data)
    if end == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    elif end == "umount":
        deltapool("umount", shared.path)
    else:
        subprocess.run(["fusermount3", "-uz", str(shared.path)], check=True)
    wait_for_end(pid)
    shared.start()
    assert {path: path.read_bytes() for path in content} == content
    assert ask(shared, "status")["recovery"]["clean"]


CONFIG_BYTES = 20_000


def race(place: pathlib.Path, rounds: int, rewrite: Callable[[pathlib.Path, bytes], None]) -> set[str]:
    """Four writers and four readers of one file. What the readers saw, in words."""
    path, stop = place / "config.json", Flag()
    path.write_bytes(b"a" * CONFIG_BYTES)

    def write(letter: bytes) -> None:
        for _ in range(rounds):
            rewrite(path, letter * CONFIG_BYTES)

    def read() -> set[str]:
        seen = set()
        while not stop:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                seen.add("missing")
                continue
            letters = set(content)
            seen.add("whole" if len(content) == CONFIG_BYTES and len(letters) == 1 else "short or mixed")
            if 0 in letters:
                seen.add("NULs")
            if not letters <= set(b"\0abcd"):
                seen.add("bytes that nobody wrote")
        return seen

    with running(read, read, read, read) as readers:
        together(*(lambda letter=letter: write(letter) for letter in (b"a", b"b", b"c", b"d")))
        stop.set()
        return set().union(*(reader.wait() for reader in readers))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["config.json", "config.jsonl"])
def test_case_08_a_file_replaced_by_rename_is_never_seen_half(folder: pathlib.Path, full: bool, name: str) -> None:
    def replace(path: pathlib.Path, data: bytes) -> None:
        temporary = path.with_name(f"{name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)

    assert race(folder, 1000 if full else 60, replace) == {"whole"}


@pytest.mark.timeout(3600)
def test_case_08_a_file_rewritten_in_place_is_seen_as_on_ext4(
    folder: pathlib.Path, tmp_path: pathlib.Path, full: bool
) -> None:
    """O_TRUNC and a write: readers may see it empty, short or mixed, but it is there and holds what somebody wrote.

    On any FUSE filesystem a read that meets a truncation may give NULs, once (docs/semantics.md). They are not kept."""

    def rewrite(path: pathlib.Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, data)
        os.close(fd)

    allowed = {"whole", "short or mixed"}
    assert race(tmp_path, 100, rewrite) <= allowed
    assert race(folder, 1000 if full else 60, rewrite) <= {*allowed, "NULs"}
    path = folder / "config.json"
    cached = path.read_bytes()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.preadv(fd, [stored := mmap.mmap(-1, 1 << 15)], 0)
    os.close(fd)
    assert stored[: len(cached)] == cached
    rewrite(path, b"a" * CONFIG_BYTES)
    assert path.read_bytes() == b"a" * CONFIG_BYTES
