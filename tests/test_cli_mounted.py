"""The command line on a mount: mounting, what status and journals say, and all the ways to end, busy ones too."""

import json
import mmap
import os
import pathlib
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from mounting import COMMAND, Mount, deltapool, is_mounted, run, wait_for_end, wait_until
from processes import Child, Flag

from deltapool.fs import control, state

Command = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture
def alive(shared: Mount) -> Iterator[Mount]:
    """The shared mount, mounted again if the test has ended it."""
    yield shared
    if not is_mounted(shared.path):
        shared.start()


def mounts_at(path: pathlib.Path) -> int:
    lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines].count(str(path))


# --- mounting


def test_defaults_serve_strange_paths(tmp_path: pathlib.Path) -> None:
    """The state folder is found by the mountpoint alone, however it is called."""
    base = tmp_path / "a b,c\\ü%20#\n"
    path = base / "work \udcff"
    base.mkdir()
    (tmp_path / "link").symlink_to(base)

    def command(*words: str | pathlib.Path) -> str:
        return run([*COMMAND, *words], cwd=base, XDG_STATE_HOME=str(base / "my state"))

    try:
        assert command("mount", "work \udcff") == ""
        (path / "f").write_bytes(b"x")
        status = json.loads(command("status", "./work \udcff/", "--json"))
        assert status["mountpoint"] == str(path)
        assert status["volume"] == state.default_volume(path)
        folder = pathlib.Path(status["state"])
        assert folder == base / "my state" / "deltapool" / status["volume"]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert command("umount", tmp_path / "link" / "work \udcff") == ""
        assert os.listdir(path) == []
        assert command("mount", path) == ""
        assert (path / "f").read_bytes() == b"x"
        assert command("umount", path) == ""
    finally:
        subprocess.run(["fusermount3", "-uz", path], check=False, capture_output=True)


def test_a_dead_mount_is_cleared_and_mounted_again(alive: Mount, refused: Refused, folder: pathlib.Path) -> None:
    (folder / "f").write_bytes(b"x")
    control.call(alive.state, "flush", 60)
    pid = alive.pid
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert f"no mount is running on {alive.state}" in refused("status", alive.path)
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        folder.stat()
    alive.start()
    assert mounts_at(alive.path) == 1
    assert (folder / "f").read_bytes() == b"x"


def test_a_dead_mount_can_be_unmounted(alive: Mount, command: Command) -> None:
    pid = alive.pid
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert command("umount", alive.path) == (0, "", "")
    assert mounts_at(alive.path) == 0


def test_in_the_foreground_it_logs_to_stderr_and_ends_with_sigterm(tmp_path: pathlib.Path) -> None:
    mount = Mount(tmp_path / "mount", tmp_path / "state")
    words = ["mount", str(mount.path), "--state", str(mount.state), "--foreground"]
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
    try:
        wait_until(lambda: is_mounted(mount.path) or process.poll() is not None, "the mount")
        (mount.path / "f").write_bytes(b"x")
        assert mount.pid == process.pid
        with Child(lambda: held_open(mount.path / "f", Flag(), Flag())):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_mounted(mount.path), "the unmount")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert re.search(r"WARNING .* is in use", err)  # the log
        assert not (mount.state / "log").exists()
    finally:
        mount.clear()


# --- what it says


def test_status_counts_what_there_is(tmp_path: pathlib.Path) -> None:
    """With the background work put off, so that what is dirty stays so."""
    config = "[limits]\nsettle_seconds = 1000\nnote_seconds = 1000\n"
    with Mount(tmp_path / "mount", tmp_path / "state", config) as mount:
        (mount.path / ".cache" / "pip").mkdir(parents=True)
        (mount.path / ".ssh").mkdir()
        for name, size in (("a", 1000), ("b", 234), (".cache/pip/c", 50), (".ssh/d", 7)):
            (mount.path / name).write_bytes(bytes(size))
        for size in (100, 150, 200):  # written whole each time
            (mount.path / "s.jsonl").write_bytes(b"x" * size)
        with open(mount.path / "t.jsonl", "ab") as file:
            file.write(b"line\n")
        fd = os.open(mount.path / "s.jsonl", os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)  # past the page cache, so that the read is met
        os.close(fd)
        found = json.loads(deltapool("status", mount.path, "--json").stdout)
        expected = {
            "volume": "test",
            "mountpoint": str(mount.path),
            "state": str(mount.state),
            "remote": "none",
            "pids": {"fs": mount.pid},
            "read_only": None,
            "journals": {
                "count": 2,
                "bytes": 205,
                "bytes_written": 455,
                "bytes_changed": 205,
                "bytes_read": 200,
                "rewrites_folded": 2,
            },
            "work": {"files": 2, "bytes": 1234, "bytes_written": 1234},
            "cache": {"files": 1, "bytes": 50},
            "host": {"files": 1, "bytes": 7},
            "dirty": {"files": 6, "bytes": 1496},
        }
        assert {key: found[key] for key in expected} == expected
        control.call(mount.state, "flush", 60)
        assert control.call(mount.state, "status", 60)["dirty"] == {"files": 0, "bytes": 0}
        os.unlink(mount.path / "b")
        os.unlink(mount.path / "t.jsonl")
        mount.remount()
        found = control.call(mount.state, "status", 60)
        assert found["work"] == {"files": 1, "bytes": 1000, "bytes_written": 0}  # counted since the mount
        assert found["journals"] == {**expected["journals"], "count": 1, "bytes": 200}  # type: ignore[dict-item] # of its life


def test_journals_lists_each_one_without_opening_it(alive: Mount, command: Command, folder: pathlib.Path) -> None:
    before = time.time_ns()
    for name, lines in (("b.jsonl", 3), ("a\x1b[31m.jsonl", 1), ("sub/c\udce9.jsonl", 0)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"line\n" * lines + b"torn")
    (folder / "no journal").write_bytes(b"x")
    code, out, err = command("journals", alive.path, "--json")
    assert (code, err) == (0, "")
    listed = [each for each in json.loads(out)["journals"] if each["path"].startswith(f"{folder.name}/")]
    assert [each["path"].removeprefix(f"{folder.name}/") for each in listed] == [
        *("a\x1b[31m.jsonl", "b.jsonl", "sub/c\udce9.jsonl")
    ]
    for each, lines in zip(listed, (1, 3, 0), strict=True):
        size = 5 * lines + 4
        assert (each["bytes"], each["lines"]) == (size, lines)
        assert (each["bytes_written"], each["bytes_changed"], each["bytes_read"]) == (size, size, 0)
        assert before - 10**9 < each["last_append_ns"] < time.time_ns() + 10**9
    out = run([*COMMAND, "journals", alive.path], cwd=pathlib.Path("/"), COLUMNS="400")
    assert "a\\x1b[31m.jsonl" in out
    assert "sub/c\\xe9.jsonl" in out
    assert "\x1b" not in out
    code, out, err = command("status", alive.path)
    assert (code, err) == (0, "")
    assert re.search(rf"^mountpoint +{alive.path} *$", out, re.MULTILINE)


def test_fsck_finds_nothing_wrong_with_a_mount_at_work(alive: Mount, command: Command, folder: pathlib.Path) -> None:
    (folder / "f.jsonl").write_bytes(b"x\n")
    code, out, err = command("fsck", alive.path)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"\d+ inodes, \d+ bytes: nothing wrong\n", out)
    code, out, err = command("fsck", "--state", alive.state, "--json")
    assert (code, err, json.loads(out)["wrong"]) == (0, "", [])


# --- ends


def held_open(path: pathlib.Path, ready: Flag, release: Flag) -> None:
    with open(path, "ab", buffering=0) as file:
        ready.set()
        wait_until(lambda: release, "the release")
        file.write(b"written late\n")
        os.fsync(file.fileno())


def stored(path: pathlib.Path, ready: Flag, release: Flag) -> None:
    """Stores to a shared mapping, without msync, before and after."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        file.close()
        memory[10:15] = b"first"
        ready.set()
        wait_until(lambda: release, "the release")
        memory[5000:5004] = b"late"
        os._exit(0)  # without even an munmap of its own


def gone_into(path: pathlib.Path, ready: Flag, release: Flag) -> None:
    os.chdir(path)
    ready.set()
    wait_until(lambda: release, "the release")


def test_a_busy_umount_names_the_holders_and_changes_nothing(
    alive: Mount, refused: Refused, command: Command, folder: pathlib.Path
) -> None:
    ready, release = [Flag(), Flag(), Flag()], Flag()
    (folder / "sub").mkdir()
    for name in ("open", "mapped"):
        (folder / name).write_bytes(bytes(10_000))
    with (
        Child(lambda: held_open(folder / "open", ready[0], release)) as opener,
        Child(lambda: stored(folder / "mapped", ready[1], release)) as mapper,
        Child(lambda: gone_into(folder / "sub", ready[2], release)) as walker,
    ):
        wait_until(lambda: all(ready), "the holders")
        said = refused("umount", alive.path)
        assert f"{alive.path} is in use, and was not unmounted" in said
        program = pathlib.Path("/proc/self/comm").read_text().strip()
        assert re.search(rf"  pid {opener.pid} \({re.escape(program)}\): fd \d+ {folder}/open\n", said)
        assert f"  pid {mapper.pid} ({program}): mapping {folder}/mapped\n" in said
        assert f"  pid {walker.pid} ({program}): cwd {folder}/sub\n" in said
        assert is_mounted(alive.path)
        (folder / "new").write_bytes(b"still works")
        release.set()
        assert mapper.reap() == 0
        opener.wait()
        walker.wait()
    assert command("umount", alive.path) == (0, "", "")
    alive.start()
    content = (folder / "mapped").read_bytes()
    assert (content[10:15], content[5000:5004]) == (b"first", b"late")
    assert (folder / "open").read_bytes().endswith(b"written late\n")


@pytest.mark.parametrize("how", ["--force", "SIGTERM"])
def test_a_mount_ended_by_force_serves_its_users_to_their_end(
    alive: Mount, command: Command, folder: pathlib.Path, how: str
) -> None:
    """An open file and dirty mappings, with stores before and after: nothing is lost."""
    ready, release, pid = [Flag() for _ in range(3)], Flag(), alive.pid
    for name in ("open.jsonl", "mapped", "mapped.jsonl"):
        (folder / name).write_bytes(b"line\n" * 2000)
    with (
        Child(lambda: held_open(folder / "open.jsonl", ready[0], release)) as opener,
        Child(lambda: stored(folder / "mapped", ready[1], release)) as mapper,
        Child(lambda: stored(folder / "mapped.jsonl", ready[2], release)) as mapper2,
    ):
        wait_until(lambda: all(ready), "the holders")
        if how == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not is_mounted(alive.path), "the detachment")
        else:
            code, out, err = command("umount", alive.path, how)
            assert (code, out) == (0, "")
            assert err == f"deltapool: {alive.path} is detached; pid {pid} serves it until its users let go\n"
        assert not is_mounted(alive.path)
        release.set()
        opener.wait()
        assert (mapper.reap(), mapper2.reap()) == (0, 0)
    wait_for_end(pid)
    alive.start()
    assert control.call(alive.state, "status", 60)["recovery"]["clean"]
    assert (folder / "open.jsonl").read_bytes() == b"line\n" * 2000 + b"written late\n"
    for name in ("mapped", "mapped.jsonl"):
        content = bytearray(b"line\n" * 2000)
        content[10:15], content[5000:5004] = b"first", b"late"
        assert (folder / name).read_bytes() == content


def test_umount_after_the_end_of_a_process_with_dirty_mappings(alive: Mount, folder: pathlib.Path) -> None:
    names, release = ["mapped", "mapped.jsonl"], Flag()
    release.set()
    for name in names:
        (folder / name).write_bytes(bytes(10_000))
    for name in names:
        with Child(lambda name=name: stored(folder / name, Flag(), release)) as child:  # type: ignore[misc] # waited for here
            assert child.reap() == 0
    alive.remount()
    for name in names:
        content = (folder / name).read_bytes()
        assert (content[10:15], content[5000:5004]) == (b"first", b"late")


def test_a_mount_left_by_sigterm_is_let_go(alive: Mount, folder: pathlib.Path) -> None:
    (folder / "f").write_bytes(b"x")
    pid = alive.pid
    os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)
    assert not is_mounted(alive.path)
    assert state.holder(alive.state) is None
    assert not (alive.state / "control.sock").exists()
    assert "Traceback" not in alive.log()
