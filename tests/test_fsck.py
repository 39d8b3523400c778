"""fsck: silent about what is right, loud about every kind of damage, and it touches nothing."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from damages import DAMAGES, Volume
from mounting import COMMAND, Mount, deltapool
from processes import Child
from trees import fill, namespace, untouched
from typer.testing import CliRunner

from deltapool.fs import consistency, fsck, state
from deltapool.fs.cli import app
from deltapool.fs.errors import StateError, UserError

KINDS = set("namespace root dangling parent name links unreachable number type private symlink xattr".split()) | set(
    "note missing changed size journal orphan undeclared".split()
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The state folder of a volume with some of everything in it, cleanly unmounted."""
    base = tmp_path_factory.mktemp("pristine")
    with Mount(base / "mount", base / "state") as mounted:
        fill(mounted.path, random.Random(1))
        mounted.stop()
    return base / "state"


@pytest.fixture
def volume(pristine: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Volume]:
    subprocess.run(["cp", "-a", "--sparse=always", "--reflink=auto", pristine, tmp_path / "copy"], check=True)
    database = namespace(tmp_path / "copy")
    volume = Volume(tmp_path / "copy", database)
    volume.note_live()  # a copy has other ctimes
    yield volume
    database.close()


def found(folder: pathlib.Path) -> list[tuple[str, int, str]]:
    return [(each.kind, each.inode, each.path) for each in fsck.check(folder).findings]


# What is right


@pytest.mark.parametrize("rules", [None, '[[rule]]\nmatch = "*"\nclass = "journal"\n'], ids=["default", "journals"])
def test_a_used_volume_has_nothing_wrong_mounted_unmounted_and_killed(
    tmp_path: pathlib.Path, rules: str | None
) -> None:
    with Mount(tmp_path / "mount", tmp_path / "state", rules) as mounted:
        fill(mounted.path, random.Random(1))
        assert mounted.fsck() == []
        mounted.stop()
        assert found(mounted.state) == []
        mounted.start()
        (mounted.path / "second").mkdir()
        fill(mounted.path / "second", random.Random(2))
        with open(mounted.path / "logs" / "short.jsonl", "ab") as journal:
            journal.write(b"dirty for as long as it is not idle\n")
        mounted.kill()
        result = fsck.check(mounted.state)
        assert result.findings == []
        assert result.in_flight["dirty"] >= 1
        mounted.start()
        assert mounted.fsck() == []
        shutil.rmtree(mounted.path / "second")
        assert mounted.fsck() == []
        mounted.stop()
        assert found(mounted.state) == []


def test_a_copy_of_a_state_folder_is_as_good(volume: Volume) -> None:
    result = fsck.check(volume.state)
    assert (result.findings, result.in_flight) == ([], {})
    assert result.inodes == volume.database.execute("SELECT count(*) FROM inode").fetchone()[0] > 50
    sizes = [path.stat().st_size for path in volume.state.glob("live/*/*")]
    assert result.bytes == sum(sizes)


def test_work_that_goes_on_is_not_damage(mount: Mount) -> None:
    """Files are made, changed, renamed, removed, all the time, and fsck looks at them all the time."""

    def work() -> None:
        chance = random.Random(3)
        for number in range(1_000_000):
            name = f"{chance.randrange(20)}{chance.choice(['', '.jsonl', '.tmp'])}"
            with open(name, chance.choice("wa")) as file:
                file.write("x" * chance.randrange(5000) + "\n")
            if number % 3 == 0:
                os.rename(name, f"{chance.randrange(20)}.jsonl")
            elif number % 7 == 0:
                os.unlink(name)
            elif number % 11 == 0:
                os.truncate(name, chance.randrange(9000))

    with Child(work, mount.path):
        for _ in range(3):
            before = mount.status()["fuse"]["requests"]
            assert found(mount.state) == []
            assert mount.status()["fuse"]["requests"] > before + 50
    assert mount.fsck() == []


def test_a_journal_that_is_cut_and_stretched_is_noted_as_what_it_is(mount: Mount) -> None:
    """Between two notes: segments that were full of lines are zeros afterwards."""
    path = mount.path / "a.jsonl"
    path.write_bytes(b"line\n" * 700_000)
    assert mount.fsck() == []
    with open(path, "r+b") as file:
        file.truncate(1 << 19)
        file.truncate(3 << 20)
    assert mount.fsck() == []
    assert mount.journals()[0]["lines"] == (1 << 19) // 5
    mount.remount()
    with open(path, "ab") as file:
        file.write(b"line\n")
    assert mount.fsck() == []


def test_an_attribute_of_a_file_without_a_name_leaves_nothing_behind(mount: Mount) -> None:
    (mount.path / "file").write_text("x")
    os.setxattr(mount.path / "file", "user.old", b"1")
    fd = os.open(mount.path / "file", os.O_RDWR)
    os.unlink(mount.path / "file")
    os.setxattr(fd, "user.new", b"2")
    assert {name: os.getxattr(fd, name) for name in os.listxattr(fd)} == {"user.old": b"1", "user.new": b"2"}
    os.removexattr(fd, "user.old")
    assert os.listxattr(fd) == ["user.new"]
    assert mount.fsck() == []
    os.close(fd)


def test_what_a_killed_daemon_left_is_in_flight_and_the_next_mount_deals_with_it(mount: Mount) -> None:
    (mount.path / "file").write_bytes(b"old")
    assert mount.fsck() == []
    fd = os.open(mount.path / "file", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"new")
    mount.kill()
    database = namespace(mount.state)
    (next_ino,) = database.execute("SELECT value FROM meta WHERE key = 'next_ino'").fetchone()
    database.execute("INSERT INTO grave VALUES (?)", (next_ino - 2,))
    database.close()
    for inode, content in ((next_ino - 2, "removed"), (next_ino - 1, ""), (next_ino, "lost"), (next_ino + 70, "lost")):
        (mount.state / "live" / f"{inode % 256:02x}" / str(inode)).write_text(content)
    result = fsck.check(mount.state)
    assert result.findings == []
    assert result.in_flight == {"dirty": 1, "new": 1, "grave": 1, "orphan": 3}
    mount.start()
    for number in range(100):
        (mount.path / str(number)).write_text("its number is not taken")
    assert mount.fsck() == []
    mount.stop()
    assert found(mount.state) == []
    assert sorted(path.name for path in (mount.state / "lost").iterdir()) == [str(next_ino), str(next_ino + 70)]


def test_what_a_power_cut_takes_from_the_marks_is_in_flight(mount: Mount) -> None:
    """In the same boot nothing can have been taken: somebody was at the file."""
    (mount.path / "file").write_bytes(b"clean")
    assert mount.fsck() == []
    inode = (mount.path / "file").stat().st_ino
    mount.kill()
    with open(mount.state / "live" / f"{inode % 256:02x}" / str(inode), "ab") as live:
        live.write(b" and more")
    assert found(mount.state) == [("changed", inode, "file")]
    database = namespace(mount.state)
    database.execute("UPDATE meta SET value = 'another' WHERE key = 'boot'")
    database.close()
    result = fsck.check(mount.state)
    assert (result.findings, result.in_flight) == ([], {"unmarked": 1})
    mount.start()
    assert (mount.path / "file").read_bytes() == b"clean and more"
    assert mount.fsck() == []


def test_it_touches_nothing(pristine: pathlib.Path, mount: Mount) -> None:
    before = untouched(pristine)
    assert found(pristine) == []
    assert untouched(pristine) == before
    (mount.path / "file").write_text("x")
    mount.kill()
    assert (mount.state / "namespace.db-wal").stat().st_size > 0
    before = untouched(mount.state)
    assert found(mount.state) == []
    assert untouched(mount.state) == before


def test_a_folder_that_was_never_mounted_is_right_and_one_without_its_namespace_is_not(
    tmp_path: pathlib.Path, volume: Volume
) -> None:
    state.open_state(tmp_path / "fresh", "test").close()
    assert found(tmp_path / "fresh") == []
    (tmp_path / "fresh" / "namespace.db").touch()
    assert found(tmp_path / "fresh") == []
    (volume.state / "namespace.db").unlink()
    kinds = {kind for kind, _, _ in found(volume.state)}
    assert kinds == {"orphan"}


def test_what_is_no_state_folder_is_refused(tmp_path: pathlib.Path, volume: Volume) -> None:
    with pytest.raises(UserError, match="is no state folder"):
        fsck.check(tmp_path)
    with pytest.raises(UserError, match="is no state folder"):
        fsck.check(tmp_path / "nowhere")
    done = deltapool("fsck", "--state", tmp_path, check=False)
    assert (done.returncode, done.stderr) == (1, f"deltapool: {tmp_path} is no state folder: it has no state.json\n")
    volume.run("PRAGMA user_version = 2")
    with pytest.raises(StateError, match="format 2, of a newer deltapool"):
        fsck.check(volume.state)


# What is wrong


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(name: str, volume: Volume) -> None:
    try:
        paths = {path: volume.inode(path) for path in ("plain", "fifo", "work", "logs/link")}
        paths |= {path: volume.inode(path) for path in ("work/big", "work/big.sum", "logs/long.jsonl")}
        paths |= {f"logs/{each}.jsonl": volume.inode(f"logs/{each}.jsonl") for each in ("short", "nuls", "stretched")}
    finally:
        kind, where, path = DAMAGES[name](volume)
    inode = paths[where] if isinstance(where, str) else where
    before = untouched(volume.state)
    done = CliRunner().invoke(app, ["fsck", "--state", str(volume.state), "--json"])
    assert done.exit_code == 1, done.output
    wrong = json.loads(done.stdout)["wrong"]
    assert (kind, inode, path) in [(each["kind"], each["inode"], each["path"]) for each in wrong]
    assert {each["kind"] for each in wrong} <= KINDS
    assert untouched(volume.state) == before


def test_there_is_a_damage_for_every_kind_and_every_rule() -> None:
    """A rule without one could be a query that never finds anything."""
    documented = set(fsck.__doc__.split("Kinds of finding:")[1].split("`")[1::2])  # type: ignore[union-attr]
    assert documented == KINDS
    assert {rule.kind for rule in consistency.RULES} <= KINDS
    assert len(DAMAGES) >= len(consistency.RULES) + len(KINDS - {rule.kind for rule in consistency.RULES})


def test_a_message_names_path_and_inode(volume: Volume) -> None:
    inode = volume.inode("plain")
    volume.live("plain").unlink()
    done = deltapool("fsck", "--state", volume.state, check=False)
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    live = f"{volume.state}/live/{inode % 256:02x}/{inode}"
    assert first == f"missing: inode {inode}, plain: its live file {live} is missing"
    assert last.endswith(": 1 wrong")


def test_names_are_shown_so_that_a_terminal_stays_whole(volume: Volume) -> None:
    for name in (b"new\nline", b"\xff\xfe no utf-8"):
        volume.run("UPDATE inode SET nlink = 5 WHERE ino = (SELECT ino FROM dentry WHERE name = ?)", name)
    done = deltapool("fsck", "--state", volume.state, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout.splitlines()) == 3
    assert r"new\nline" in done.stdout
    assert r"\xff\xfe no utf-8" in done.stdout


def test_damage_under_a_running_mount_is_found(mount: Mount) -> None:
    for name in ("a", "b.jsonl"):
        (mount.path / name).write_text("content\n")
    inode = (mount.path / "a").stat().st_ino
    assert mount.fsck() == []
    (mount.state / "live" / f"{inode % 256:02x}" / str(inode)).unlink()
    (mount.state / "live" / "09" / "777").write_text("whose?")
    (mount.state / "stray").touch()
    done = deltapool("fsck", mount.path, "--json", check=False)
    assert done.returncode == 1
    assert sorted((each["kind"], each["inode"], each["path"]) for each in json.loads(done.stdout)["wrong"]) == [
        ("missing", inode, "a"),
        ("orphan", 777, "live/09/777"),
        ("undeclared", 0, "stray"),
    ]


def test_a_mount_that_has_failed_is_checked_all_the_same(mount: Mount) -> None:
    """It does not flush any more, and what was clean is compared."""
    (mount.path / "clean").write_text("x")
    assert mount.fsck() == []
    before = time.monotonic()
    script = f"""
import sys, deltapool.fs.fsck as fsck, deltapool.fs.control as control, pathlib
asked, real = [], control.call
def call(folder, command, *rest):
    asked.append(command)
    answer = real(folder, command, *rest)
    return answer | {{"read_only": "a disk failed"}} if command == "status" else answer
control.call = call
print(fsck.check(pathlib.Path({str(mount.state)!r})).findings, asked)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] ['status']\n"
    assert time.monotonic() - before < fsck.ANSWER_SECONDS


def test_the_command_explains_itself() -> None:
    done = subprocess.run([*COMMAND, "fsck", "--help"], capture_output=True, text=True, check=True)
    assert "Example: deltapool fsck" in done.stdout
    done = subprocess.run([*COMMAND, "fsck"], capture_output=True, text=True, check=False)
    assert (done.returncode, "give DIR or --state" in done.stderr) == (2, True)
