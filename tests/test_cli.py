"""The command line: why something cannot be done, where it is said, and with which exit code.

Most commands run in this process, through the same entry point.
"""

import json
import os
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

import apsw
import pytest
from mounting import COMMAND, Mount, is_mounted

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="hides /dev in a mount namespace: only root can")


Refused = Callable[..., str]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Mount]:
    """A volume that is not mounted yet; unmounted in the end, whatever happened."""
    mount = Mount(tmp_path / "mount", tmp_path / "state")
    yield mount
    mount.clear()


def mounting(mount: Mount, *more: str) -> list[str]:
    return ["mount", str(mount.path), "--state", str(mount.state), *more]


# --- why it cannot be mounted


@as_root
def test_mount_says_that_dev_fuse_is_missing(place: Mount) -> None:
    words = [*COMMAND, *mounting(place)]
    hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh", *words]
    done = subprocess.run(hidden, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "deltapool: /dev/fuse is missing: load the fuse module\n"
    assert not place.state.exists()


def test_mount_says_that_dev_fuse_cannot_be_opened(
    place: Mount, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, _mode: path != "/dev/fuse")
    assert "/dev/fuse cannot be opened by this user" in refused(*mounting(place))
    assert not place.state.exists()


def test_mount_says_that_fusermount_is_missing(
    place: Mount, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "fusermount3 is missing: install the package fuse3" in refused(*mounting(place))
    assert not place.state.exists()


def test_mount_refuses_what_is_no_empty_folder(place: Mount, refused: Refused) -> None:
    place.path.mkdir()
    (place.path / "thesis.tex").touch()
    assert "is not empty ('thesis.tex')" in refused(*mounting(place))
    (place.path / "thesis.tex").unlink()
    place.path.rmdir()
    place.path.touch()
    assert "is no folder" in refused(*mounting(place))
    assert "Not a directory" in refused("mount", place.path / "below", "--state", place.state)
    assert not place.state.exists()


def test_mount_refuses_a_state_folder_in_use(shared: Mount, refused: Refused, tmp_path: pathlib.Path) -> None:
    said = refused("mount", tmp_path / "other", "--state", shared.state)
    assert f"{shared.state} is in use by pid {shared.pid}" in said
    assert not is_mounted(tmp_path / "other")


def test_mount_refuses_a_live_mount(shared: Mount, refused: Refused, tmp_path: pathlib.Path) -> None:
    (shared.path / "f").write_bytes(b"x")
    said = refused("mount", shared.path, "--state", tmp_path / "other")
    assert f"{shared.path} is mounted already, from {shared.state}" in said
    assert (shared.path / "f").read_bytes() == b"x"
    assert not (tmp_path / "other").exists()


def test_mount_refuses_a_state_folder_inside_the_mount(place: Mount, refused: Refused) -> None:
    said = refused("mount", place.path, "--state", place.path / ".state")
    assert f"the state folder {place.path}/.state would lie inside the mount {place.path}" in said
    link = place.path.parent / "link"
    link.symlink_to(place.path)
    assert "would lie inside the mount" in refused("mount", place.path, "--state", link / "state")
    assert not place.path.exists()


def test_mount_refuses_a_state_folder_whose_path_is_no_text(place: Mount, refused: Refused) -> None:
    assert "is no UTF-8" in refused("mount", place.path, "--state", f"{place.state}\udcff")


def test_mount_refuses_a_foreign_folder_as_state(place: Mount, refused: Refused) -> None:
    place.state.mkdir()
    (place.state / "thesis.tex").touch()
    assert "holds 'thesis.tex' but no state.json: it is no state folder" in refused(*mounting(place))
    assert os.listdir(place.state) == ["thesis.tex"]


def test_mount_refuses_a_state_of_a_newer_format(place: Mount, refused: Refused) -> None:
    """Whichever of the two files says so; and nothing is changed by it."""
    place.start()
    place.stop()
    described = place.state / "state.json"
    original = described.read_text()
    described.write_text(json.dumps({**json.loads(original), "format": 99}))
    assert "has format 99, of a newer deltapool" in refused(*mounting(place))
    described.write_text("{")
    assert f"{described} is damaged" in refused(*mounting(place))
    described.write_text(original)
    assert "holds the volume 'test', not 'other'" in refused(*mounting(place, "--volume", "other"))

    database = apsw.Connection(str(place.state / "namespace.db"))
    version = database.pragma("user_version")
    database.pragma("user_version", 99)
    assert "namespace.db has format 99, of a newer deltapool" in refused(*mounting(place))
    assert "namespace.db has format 99, of a newer deltapool" in refused("fsck", "--state", place.state)
    database.pragma("user_version", version)
    application = database.pragma("application_id")
    database.pragma("application_id", 7)
    assert "belongs to another program" in refused(*mounting(place))
    database.pragma("application_id", application)
    database.close()
    place.start()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]]\nmatch = 1\n", "line 1"),
        (
            '[[rule]]\nmatch = "x"\nclass = "gold"\n',
            'line 1: .*class = "journal", "work", "cache" or "host", not .gold',
        ),
        ('\n\n[[rule]]\nmatch = ".git/"\nclass = "cache"\n', r"line 3: .*\.git"),
        ('[[rule]]\nmatch = ".ssh/"\nclass = "cache"\n', r"line 1: .*\.ssh"),
        ("[limits]\nno_such_limit = 1\n", "no_such_limit"),
        ("[limits]\nthreads = 0\n", "limits.threads must be a number above 0"),
        ("[fuse]\npoll = 1\n", "poll and renegotiate, true or false"),
        ("not toml", "rules.toml"),
    ],
)
def test_mount_says_what_is_wrong_with_the_rules(
    place: Mount, refused: Refused, tmp_path: pathlib.Path, text: str, message: str
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    said = refused(*mounting(place, "--config", str(rules)))
    assert str(rules) in said
    assert re.search(message, said), said
    assert not place.state.exists()


def test_mount_says_that_the_rules_are_missing(place: Mount, refused: Refused) -> None:
    assert "No such file" in refused(*mounting(place, "--config", "/no/such/rules.toml"))
    assert not place.state.exists()


# --- arguments

COMMANDS = ["mount", "umount", "status", "journals", "fsck"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_with_an_example(command: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, err = command(name, "--help")
    assert (code, err) == (0, "")
    assert f"Example: deltapool {name}" in out
    assert f"Usage: deltapool {name}" in out


def test_the_help_names_every_command(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^\W*{name} ", out, re.MULTILINE) for name in COMMANDS)
    code, out, _ = command("--version")
    assert (code, out.split()[0]) == (0, "deltapool")


@pytest.mark.parametrize(
    "words",
    [["no-such-command"], ["mount"], ["status"], ["umount", "a", "b"], ["fsck"], ["mount", "a", "--no-such-option"]],
)
def test_wrong_arguments_end_with_2(command: Callable[..., tuple[int, str, str]], words: list[str]) -> None:
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert "Usage: deltapool" in err


@pytest.mark.parametrize("name", ["umount", "status", "journals", "fsck"])
def test_commands_say_that_nothing_is_mounted(refused: Refused, tmp_path: pathlib.Path, name: str) -> None:
    assert refused(name, tmp_path) == f"deltapool: nothing of deltapool is mounted at {tmp_path}\n"


def test_a_volume_needs_a_decent_name(place: Mount, refused: Refused) -> None:
    for name in ("", "../x", "a b", "-x", "x" * 129):
        assert "is no volume name" in refused(*mounting(place, f"--volume={name}"))
    assert not place.state.exists()


def test_fsck_refuses_what_is_no_state_folder(refused: Refused, tmp_path: pathlib.Path) -> None:
    assert "is no state folder" in refused("fsck", "--state", tmp_path)
    assert os.listdir(tmp_path) == []
