"""scripts/rescue: the whole tree comes out of a state folder, whatever became of the daemon, as a mount shows it."""

import ast
import contextlib
import os
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from mounting import RESCUE, Mount
from trees import AS_ROOT, fill, namespace, seen, untouched

SYSTEM_PYTHON = pathlib.Path("/usr/bin/python3")
LIVE = "live/{:02x}/{}"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A mounted volume with some of everything in it, all of it clean."""
    base = tmp_path_factory.mktemp("rescue")
    with Mount(base / "mount", base / "state") as mounted:
        fill(mounted.path, random.Random(1))
        assert mounted.fsck() == []
        yield mounted


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The state folder of such a volume that nobody holds, not to be changed."""
    base = tmp_path_factory.mktemp("state")
    with Mount(base / "mount", base / "state") as mounted:
        fill(mounted.path, random.Random(1))
        mounted.stop()
    return mounted.state


def rescue(folder: pathlib.Path, destination: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """By a Python that knows nothing of deltapool, from a folder that is not ours."""
    return subprocess.run(
        [sys.executable, "-I", "-S", RESCUE, folder, destination], capture_output=True, text=True, cwd="/", check=False
    )


@contextlib.contextmanager
def writing(path: pathlib.Path, flags: int) -> Iterator[int]:
    """A descriptor that may outlive the daemon."""
    fd = os.open(path, os.O_WRONLY | flags)
    yield fd
    with contextlib.suppress(OSError):
        os.close(fd)


def sync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def live(folder: pathlib.Path, inode: int) -> pathlib.Path:
    return folder / LIVE.format(inode % 256, inode)


def inode_of(folder: pathlib.Path, name: bytes) -> int:
    database = namespace(folder)
    (inode,) = database.execute("SELECT ino FROM dentry WHERE name = ?", (name,)).fetchone()
    database.close()
    return int(inode)


def test_the_tree_of_a_mounted_volume(filled: Mount, tmp_path: pathlib.Path) -> None:
    assert filled.fsck() == []  # flushes
    done = rescue(filled.state, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "a daemon holds the state folder" in done.stderr
    assert seen(tmp_path / "out") == seen(filled.path)


def test_the_tree_of_an_unmounted_volume(filled: Mount, tmp_path: pathlib.Path) -> None:
    expected = seen(filled.path)
    filled.stop()
    before = untouched(filled.state)
    done = rescue(filled.state, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert seen(tmp_path / "out") == expected
    assert untouched(filled.state) == before
    filled.start()
    assert seen(filled.path) == expected


def test_the_tree_of_a_killed_daemon_is_the_one_after_recovery(filled: Mount, tmp_path: pathlib.Path) -> None:
    work = filled.path / "killed"
    work.mkdir()
    fill(work, random.Random(2))
    sync(work)
    (work / "plain").write_bytes(b"rewritten just before")
    with writing(work / "logs" / "long.jsonl", os.O_APPEND) as journal:
        os.write(journal, b"one line more\n")
        filled.kill()
    before = untouched(filled.state)
    assert (filled.state / "namespace.db-wal").exists()
    done = rescue(filled.state, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert untouched(filled.state) == before
    filled.start()
    after = seen(filled.path)
    assert seen(tmp_path / "out") == after
    assert after[b"killed/logs/long.jsonl"][-2] > after[b"logs/long.jsonl"][-2]
    shutil.rmtree(work)


def test_a_rewrite_that_was_not_finished_is_the_old_content(filled: Mount, tmp_path: pathlib.Path) -> None:
    path = filled.path / "half"
    path.write_bytes(b"old and whole")
    assert filled.fsck() == []
    with writing(path, os.O_TRUNC) as fd:
        os.write(fd, b"new, but not fin")
        filled.kill()
    assert list(filled.state.glob("live/*/*.new"))
    assert rescue(filled.state, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "half").read_bytes() == b"old and whole"
    filled.start()
    assert path.read_bytes() == b"old and whole"
    os.unlink(path)


@pytest.mark.parametrize("boot", ["same boot", "another boot"])
def test_what_a_power_cut_leaves_is_read_as_recovery_reads_it(filled: Mount, tmp_path: pathlib.Path, boot: str) -> None:
    """NULs where bytes were lost, a live file that never came to be, a dirty mark that was lost, and a journal in which
    NULs are at home."""
    (filled.path / "unmarked.jsonl").write_bytes(b"line\n")
    assert filled.fsck() == []
    for name in ("cut.jsonl", "nuls-at-home.jsonl", "lost", "work-with-nuls"):
        (filled.path / name).write_bytes(b"line\n\0\n" if name == "nuls-at-home.jsonl" else b"line\n")
        sync(filled.path / name)
    filled.kill()
    if boot == "another boot":
        database = namespace(filled.state)
        database.execute("UPDATE meta SET value = 'another' WHERE key = 'boot'")
        database.close()
    for name in (b"cut.jsonl", b"nuls-at-home.jsonl", b"work-with-nuls", b"unmarked.jsonl"):
        with open(live(filled.state, inode_of(filled.state, name)), "ab") as file:
            file.write(b"more" + bytes(5000) + b"tail")
    live(filled.state, inode_of(filled.state, b"lost")).unlink()
    assert rescue(filled.state, tmp_path / "out").returncode == 0
    filled.start()
    expected = {
        "cut.jsonl": b"line\nmore",
        "unmarked.jsonl": b"line\nmore",
        "nuls-at-home.jsonl": b"line\n\0\nmore" + (bytes(5000) + b"tail" if boot == "same boot" else b""),
        "lost": b"",
        "work-with-nuls": b"line\nmore" + bytes(5000) + b"tail",
    }
    for name, content in expected.items():
        assert (tmp_path / "out" / name).read_bytes() == content == (filled.path / name).read_bytes(), name
        os.unlink(filled.path / name)


def test_holes_stay_holes(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert rescue(state, tmp_path / "out").returncode == 0
    status = (tmp_path / "out" / "work" / "sparse").stat()
    assert (status.st_size, status.st_blocks * 512 < 1 << 20) == (9 << 20, True)


def test_what_cannot_be_written_is_named_and_the_rest_is_written(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = live(state, inode_of(state, b"torn.jsonl"))
    path.rename(tmp_path / "aside")
    try:
        done = rescue(state, tmp_path / "out")
    finally:
        (tmp_path / "aside").rename(path)
    assert done.returncode == 1
    assert sorted(line.split(": ")[1] for line in done.stderr.splitlines()) == [
        "b'logs/torn.jsonl'",
        "b'logs/torn.txt'",
    ]
    assert str(path) in done.stderr
    assert done.stdout.endswith("2 left out\n")
    assert (tmp_path / "out" / "logs" / "short.jsonl").exists()
    assert not (tmp_path / "out" / "logs" / "torn.jsonl").exists()


@pytest.mark.skipif(not (AS_ROOT and SYSTEM_PYTHON.exists()), reason="takes another user, who has a Python")
def test_a_user_gets_all_but_the_devices(state: pathlib.Path) -> None:
    """In folders that this user can reach, with the Python, and the SQLite, of the system."""
    with tempfile.TemporaryDirectory() as base:
        subprocess.run(["cp", "-a", "--sparse=always", state, RESCUE, base], check=True)
        subprocess.run(["chown", "-R", "65534:65534", base], check=True)
        done = subprocess.run(
            [SYSTEM_PYTHON, "-I", "-S", f"{base}/rescue", f"{base}/state", f"{base}/out"],
            capture_output=True,
            text=True,
            cwd="/",
            user=65534,
            group=65534,
            extra_groups=[],
        )
        assert done.returncode == 1
        (refused,) = done.stderr.splitlines()
        assert refused.startswith("not written: b'null': ")
        out = pathlib.Path(base, "out")
        assert (out / "work" / "big").read_bytes() == (out / "work" / "deep" / "again").read_bytes()
        assert {uid for _, _, uid, *_ in seen(out).values()} == {65534}


def damaged(state: pathlib.Path, tmp_path: pathlib.Path, *statements: str) -> pathlib.Path:
    """A copy of the state folder after these statements; its live files are the same."""
    copy = tmp_path / "damaged"
    copy.mkdir()
    (copy / "live").symlink_to(state / "live")
    (copy / "namespace.db").write_bytes((state / "namespace.db").read_bytes())
    database = namespace(copy)
    for statement in statements:
        assert database.execute(statement).rowcount != 0
    database.close()
    return copy


def test_names_that_would_lead_elsewhere_are_refused(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = damaged(
        state,
        tmp_path,
        "UPDATE dentry SET name = x'2e2e2f657363617065' WHERE name = CAST('plain' AS BLOB)",  # ../escape
        "UPDATE dentry SET name = x'2e2e' WHERE name = CAST('empty' AS BLOB)",
        "UPDATE dentry SET name = x'6100' WHERE name = CAST('fifo' AS BLOB)",
        "UPDATE dentry SET name = 7 WHERE name = CAST('socket' AS BLOB)",
    )
    done = rescue(copy, tmp_path / "out")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 4
    assert sorted(each.name for each in tmp_path.iterdir()) == ["damaged", "out"]
    assert (tmp_path / "out" / "logs" / "long.jsonl").exists()


def test_a_tree_that_bites_its_tail_ends(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    work = inode_of(state, b"work")
    copy = damaged(
        state,
        tmp_path,
        f"INSERT INTO dentry VALUES (1 << 40, {work}, CAST('round' AS BLOB), {work}, 1)",
        f"INSERT INTO dentry VALUES (2 << 40, {work}, CAST('nothing' AS BLOB), 77, 1)",
        "DELETE FROM symlink",
    )
    done = rescue(copy, tmp_path / "out")
    assert done.returncode == 1
    for path in ("b'work/round'", "b'work/nothing'", "b'dangling'", "b'logs/link'"):
        assert path in done.stderr


def test_a_namespace_that_is_none_is_said_so(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = damaged(state, tmp_path, "PRAGMA user_version = 2")
    done = rescue(copy, tmp_path / "out")
    assert done.returncode == 1
    assert "format 2" in done.stderr
    (copy / "namespace.db").write_bytes(b"nothing of SQLite" * 1000)
    done = rescue(copy, tmp_path / "out")
    assert done.returncode == 1
    assert "not a database" in done.stderr
    assert "Traceback" not in done.stderr


def test_pages_that_are_damaged_cost_their_own_part_only(state: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = damaged(state, tmp_path, "UPDATE meta SET value = value")
    database = namespace(copy)
    (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'xattr'").fetchone()
    database.close()
    with open(copy / "namespace.db", "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    done = rescue(copy, tmp_path / "out")
    assert done.returncode == 1
    assert "malformed" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "logs" / "long.jsonl").stat().st_size > 1_000_000


@pytest.mark.parametrize("where", ["full", "state/inside", "no-state"])
def test_a_place_that_will_not_do_is_refused(state: pathlib.Path, tmp_path: pathlib.Path, where: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("stays")
    before = untouched(state)
    destination = state / "inside" if where == "state/inside" else tmp_path / where
    done = rescue(tmp_path if where == "no-state" else state, destination)
    assert done.returncode == 1
    assert done.stderr.startswith("rescue: ")
    assert (tmp_path / "full" / "precious").read_text() == "stays"
    assert untouched(state) == before


def test_nobody_takes_the_folder_meanwhile_and_the_refusal_names_no_dead_daemon(
    filled: Mount, tmp_path: pathlib.Path
) -> None:
    """Rescue holds the lock in common with others; a mount waits a moment for it, then says so."""
    filled.kill()
    source = (
        "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, filled.state / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert rescue(filled.state, tmp_path / "out").returncode == 0
        with pytest.raises(AssertionError, match="is in use by pid unknown"):
            filled.start()
        other.communicate()
    filled.start()


def test_it_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(RESCUE.read_bytes())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
    assert os.access(RESCUE, os.X_OK)
    assert RESCUE.read_bytes().startswith(b"#!/usr/bin/env python3\n")


def test_it_runs_beside_the_sqlite_that_the_daemon_has(filled: Mount, tmp_path: pathlib.Path) -> None:
    """Mounted, with the log of the database far from empty: what was committed is there, what comes later is not."""
    for number in range(200):
        (filled.path / f"many-{number}").write_text(str(number))
    assert filled.fsck() == []
    done = rescue(filled.state, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (filled.state / "namespace.db-wal").stat().st_size > 4096
    for number in range(200):
        assert (tmp_path / "out" / f"many-{number}").read_text() == str(number)
        os.unlink(filled.path / f"many-{number}")
    with sqlite3.connect(f"file:{filled.state}/namespace.db?mode=ro", uri=True) as database:
        assert database.execute("PRAGMA quick_check").fetchone() == ("ok",)
