"""What is promised about rewritten journals beyond their bytes: what a rewrite may cost on disk, that a truncation with
nothing after it happens, and that a crash in the middle finds the old journal or the new one."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import scenarios
from conftest import ALL_JOURNALS
from mounting import Mount, wait_until
from scenarios import messages

from deltapool.fs import control
from deltapool.fs.fold import common_prefix
from deltapool.fs.inode import Ino
from deltapool.fs.livefile import relative_path

LOGGED_BYTES_A_SECOND = 16 << 10  # of the namespace, whatever is appended
PACE_SECONDS = 0.02
# A machine that stops for a second must not end a hold-back: that is another promise, and tested below.
PATIENT = "[limits]\nhold_back_seconds = 30\n"


def status(mounted: Mount) -> dict[str, Any]:
    answer: dict[str, Any] = control.call(mounted.state, "status", 60)
    return answer


def flush(mounted: Mount) -> None:
    assert control.call(mounted.state, "flush", 60)["dirty"] == 0


def disk_bytes(pid: int) -> int:
    """What a process has caused to be written to disks: pages that became dirty, but for those of files that it removed
    before the kernel came to them."""
    fields = dict(line.split(": ") for line in pathlib.Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


def live_file(mounted: Mount, path: pathlib.Path) -> pathlib.Path:
    return mounted.state / "live" / relative_path(Ino(path.stat().st_ino))


# What it may cost


def paced(count: int, act: Callable[[int], object]) -> float:
    """Acts now and then, as an agent does; gives the seconds that it took."""
    began = time.monotonic()
    for number in range(count):
        act(number)
        wait = began + number * PACE_SECONDS - time.monotonic()
        if wait > 0:
            time.sleep(wait)  # sleeps: what is promised is promised per second
    return time.monotonic() - began


@pytest.mark.slow
def test_s1_with_300_messages_of_2_kb_costs_their_bytes(tmp_path: pathlib.Path) -> None:
    """bytes_changed is the final size, as many bytes are written to live files, the namespace logs at most 16 KiB a
    second, and so the disk sees at most 1.3 times the final size."""
    lines = [line.ljust(2047, b" ")[:2046] + b"\n" for line in messages(300, 2000)]
    final = len(b"".join(lines))
    with Mount(tmp_path / "mount", tmp_path / "state", PATIENT) as mounted:
        flush(mounted)
        before, disk_before, path = status(mounted), disk_bytes(mounted.pid), str(mounted.path / "conversation.jsonl")
        seconds = paced(300, lambda number: scenarios.rewrite(os, path, lines[: number + 1]))
        took, disk = status(mounted), disk_bytes(mounted.pid) - disk_before
        flush(mounted)
        assert pathlib.Path(path).read_bytes() == b"".join(lines)
    assert took["journals"]["bytes_written"] == sum(len(b"".join(lines[:count])) for count in range(1, 301))
    assert took["journals"]["rewrites_folded"] == 299
    assert took["journals"]["bytes_changed"] == took["live"]["bytes_pwritten"] == final
    logged = took["namespace"]["bytes_logged"] - before["namespace"]["bytes_logged"]
    assert logged <= LOGGED_BYTES_A_SECOND * (seconds + 1)
    # 0.3 of the final size are 11 seconds of the namespace: a machine that needs longer may use more of those.
    assert disk <= final + max(0.3 * final, LOGGED_BYTES_A_SECOND * seconds)


@pytest.mark.parametrize("size", [100, 20_000])
def test_an_append_writes_no_metadata(mount: Mount, size: int) -> None:
    path = str(mount.path / "x.jsonl")
    scenarios.append(os, path, b"first\n")
    flush(mount)
    scenarios.append(os, path, b"second\n")  # marks it dirty, which is metadata
    before = status(mount)["namespace"]["bytes_logged"]
    seconds = paced(150, lambda number: [scenarios.append(os, path, bytes(size) + b"\n") for _ in range(4)])
    logged = status(mount)["namespace"]["bytes_logged"] - before
    assert logged <= LOGGED_BYTES_A_SECOND * (seconds + 1)


def test_an_append_costs_the_same_behind_a_tebibyte_of_nothing(mount: Mount) -> None:
    """Neither its digest, nor its rows, nor its memory grow with what lies before it."""
    path = mount.path / "long.jsonl"
    path.write_bytes(b"begin\n")
    os.truncate(path, 1 << 40)
    flush(mount)
    before = status(mount)
    with open(path, "ab", buffering=0) as file:
        for number in range(3):
            file.write(b"%d\n" % number)
            flush(mount)
    took = status(mount)
    assert took["journals"]["bytes_changed"] - before["journals"]["bytes_changed"] == 6
    assert took["live"]["bytes_pwritten"] - before["live"]["bytes_pwritten"] == 6
    assert took["namespace"]["bytes_logged"] < 1 << 20
    peak = pathlib.Path(f"/proc/{took['pids']['fs']}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(peak) < 250 << 10  # kB; a list of the segments would be more
    os.truncate(path, 6)


# Truncated, and then silence

RULES = {"default rules": "", "everything a journal": ALL_JOURNALS}


@contextlib.contextmanager
def mounted_with(rules: str, limits: str, factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, str]]:
    """A mount, and the suffix that makes a journal there."""
    base = factory.mktemp("rewrites")
    with Mount(base / "mount", base / "state", limits + RULES[rules]) as mounted:
        yield mounted, ".jsonl" if rules == "default rules" else ".txt"


@pytest.fixture(scope="module", params=RULES)
def ordinary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, str]]:
    with mounted_with(request.param, "", tmp_path_factory) as made:
        yield made


@pytest.fixture(scope="module", params=RULES)
def patient(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, str]]:
    with mounted_with(request.param, PATIENT, tmp_path_factory) as made:
        yield made


def test_a_truncation_and_then_silence(ordinary: tuple[Mount, str]) -> None:
    """The old bytes stay for a second, and then they are gone, for real, though the file is still open."""
    mounted, suffix = ordinary
    path, whole = mounted.path / f"silence{suffix}", b"".join(messages(100))
    path.write_bytes(whole)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    assert path.stat().st_size == 0
    wait_until(lambda: live_file(mounted, path).stat().st_size == 0, "the end of the hold-back")
    assert path.read_bytes() == b""
    os.write(fd, whole[:50])
    assert path.read_bytes() == whole[:50]
    os.close(fd)

    path.write_bytes(whole)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, whole[:5000])
    wait_until(lambda: live_file(mounted, path).stat().st_size == 5000, "the end of the hold-back")
    os.write(fd, whole[5000:])
    os.close(fd)
    assert path.read_bytes() == whole


def test_a_truncation_by_name_and_then_silence(ordinary: tuple[Mount, str]) -> None:
    mounted, suffix = ordinary
    path = mounted.path / f"by-name{suffix}"
    path.write_bytes(b"".join(messages(100)))
    os.truncate(path, 0)
    assert path.stat().st_size == 0
    wait_until(lambda: live_file(mounted, path).stat().st_size == 0, "the end of the hold-back")
    os.truncate(path, 10)
    assert path.read_bytes() == bytes(10)
    mounted.remount()
    assert path.read_bytes() == bytes(10)


# A crash in the middle


def crash(mounted: Mount, descriptors: list[int]) -> None:
    mounted.kill()
    for fd in descriptors:
        with contextlib.suppress(OSError):  # the mount behind it is dead
            os.close(fd)
    mounted.start()
    assert mounted.fsck() == []


@pytest.mark.crash
@pytest.mark.parametrize("extends", [True, False], ids=["an extension", "another suffix"])
def test_a_crash_in_a_rewrite_finds_the_old_journal_or_the_new_one(patient: tuple[Mount, str], extends: bool) -> None:
    """As long as both agree it is the old one, then what was written of the new one."""
    mounted, suffix = patient
    old = b"".join(messages(100))
    new = old + b"more\n" * 400 if extends else old[:9000] + b"something else\n" * 400
    chunks = [new[start : start + 4000] for start in range(0, len(new), 4000)]
    paths = [mounted.path / f"{extends}-{count}{suffix}" for count in range(len(chunks) + 1)]
    for path in paths:
        path.write_bytes(old)
    flush(mounted)
    descriptors, so_far = [os.open(path, os.O_WRONLY | os.O_TRUNC) for path in paths], [b""] * len(paths)
    for count, fd in enumerate(descriptors):
        for chunk in chunks[:count]:
            os.write(fd, chunk)
            so_far[count] += chunk
    assert [path.read_bytes() for path in paths] == so_far
    crash(mounted, descriptors)
    common = common_prefix(old, new)
    assert [path.read_bytes() for path in paths] == [part if len(part) > common else old for part in so_far]


@pytest.mark.crash
@pytest.mark.parametrize("temporary", ["tmp1", "tmp1.jsonl"])
def test_a_crash_around_a_replacement_finds_the_old_file_or_the_new_one(
    patient: tuple[Mount, str], temporary: str
) -> None:
    mounted, suffix = patient
    old = b"".join(messages(100))
    cases = [(synced, renamed) for synced in (False, True) for renamed in (False, True)]
    folders = [mounted.path / f"{temporary}-{synced}-{renamed}" for synced, renamed in cases]
    for folder in folders:
        folder.mkdir()
        (folder / f"x{suffix}").write_bytes(old)
    flush(mounted)
    for folder, (synced, renamed) in zip(folders, cases, strict=True):
        fd = os.open(folder / temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, old + b"more\n")
        if synced:
            os.fsync(fd)
        os.close(fd)
        if renamed:
            os.rename(folder / temporary, folder / f"x{suffix}")
    crash(mounted, [])
    for folder, (synced, renamed) in zip(folders, cases, strict=True):
        found = (folder / f"x{suffix}").read_bytes()
        assert found in ((old, old + b"more\n") if renamed else (old,))
        if synced and found == old:
            assert (folder / temporary).read_bytes() == old + b"more\n"


@pytest.mark.crash
def test_a_crash_after_the_hold_back_finds_the_new_file(ordinary: tuple[Mount, str]) -> None:
    mounted, suffix = ordinary
    path, whole = mounted.path / f"held{suffix}", b"".join(messages(100))
    path.write_bytes(whole)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, whole[:5000])
    wait_until(lambda: live_file(mounted, path).stat().st_size == 5000, "the end of the hold-back")
    crash(mounted, [fd])
    assert path.read_bytes() == whole[:5000]
