"""Classes on the mount: over hard links, renames and renamed folders, with the default rules; and where names are kept.

The rules themselves are tested without a mount (test_classes.py).
"""

import os
import pathlib
import sqlite3
import stat
from collections.abc import Callable
from typing import Any

import pytest
from mounting import Mount

from deltapool.fs import control


def class_of(path: pathlib.Path) -> str:
    return os.getxattr(path, "user.deltapool.class").decode()


def write(path: pathlib.Path, content: bytes = b"content\n") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def flush(mount: Mount) -> None:
    control.call(mount.state, "flush", 60)


def names_in(mount: Mount, table: str) -> set[str]:
    """The names of a table of the namespace, which is only read."""
    flush(mount)
    connection = sqlite3.connect(f"file:{mount.state}/namespace.db?mode=ro", uri=True)
    try:
        return {os.fsdecode(name) for (name,) in connection.execute(f"SELECT name FROM {table}")}
    finally:
        connection.close()


def totals(mount: Mount) -> dict[str, tuple[int, int]]:
    status = control.call(mount.state, "status", 60)
    found = {name: (status[name]["files"], status[name]["bytes"]) for name in ("work", "cache", "host")}
    return {**found, "journal": (status["journals"]["count"], status["journals"]["bytes"])}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("notes.txt", "work"),
        ("session.jsonl", "journal"),
        ("session.jsonl.lock", "work"),
        ("session.jsonl.zst", "work"),
        (".events.jsonl.a1b2.tmp", "work"),
        (".ssh/id_ed25519", "host"),
        (".codex/auth.json", "host"),
        (".claude/.credentials.json", "host"),
        (".aws/history.jsonl", "host"),
        (".cache/pip/http/x", "cache"),
        ("go/pkg/mod/x.jsonl", "cache"),
        (".git/x.jsonl", "work"),
    ],
)
def test_a_file_has_the_class_of_its_path(folder: pathlib.Path, name: str, expected: str) -> None:
    assert class_of(write(folder / name)) == expected


def test_host_wins_and_cache_yields_over_all_names_of_a_file(folder: pathlib.Path) -> None:
    """Names come and go; after each step, the class."""
    path, journal, host = folder / "f", folder / "f.jsonl", folder / ".ssh" / "f"
    cache, cache2 = folder / ".cache" / "pip" / "f", folder / ".cache" / "pip" / "g"
    for each in (host, cache):
        each.parent.mkdir(parents=True)
    steps: list[tuple[Callable[[], Any], str]] = [
        (lambda: write(cache), "cache"),
        (lambda: os.link(cache, cache2), "cache"),
        (lambda: os.link(cache, path), "work"),
        (lambda: os.link(path, journal), "journal"),
        (lambda: os.link(path, host), "host"),
        (lambda: journal.unlink(), "host"),
        (lambda: host.unlink(), "work"),
        (lambda: os.rename(path, journal), "journal"),
        (lambda: os.unlink(cache), "journal"),
        (lambda: os.rename(journal, path), "work"),
        (lambda: path.unlink(), "cache"),
        (lambda: os.rename(cache2, path), "work"),
    ]
    content = b"content\n"
    for number, (step, expected) in enumerate(steps):
        step()
        present = [each for each in (path, journal, host, cache, cache2) if each.exists()]
        assert {class_of(each) for each in present} == {expected}, f"step {number}"
        with open(present[0], "ab") as file:
            file.write(b"%d\n" % number)
        content += b"%d\n" % number
        assert {each.read_bytes() for each in present} == {content}


def test_the_class_is_right_with_very_many_names(shared: Mount, folder: pathlib.Path) -> None:
    path = write(folder / "f")
    (folder / ".ssh").mkdir()
    for number in range(60):
        os.link(path, folder / f"link{number}")
    assert class_of(path) == "work"
    os.link(path, folder / "f.jsonl")
    assert class_of(path) == "journal"
    os.link(path, folder / ".ssh" / "many")
    assert class_of(path) == "host"
    assert {"link0", "link59", "many", "f.jsonl"} <= names_in(shared, "private_dentry")
    os.unlink(folder / ".ssh" / "many")
    assert class_of(path) == "journal"
    os.unlink(folder / "f.jsonl")
    assert class_of(path) == "work"
    assert not {"link0", "link59", "many", "f.jsonl"} & names_in(shared, "private_dentry")
    for number in range(60):
        os.unlink(folder / f"link{number}")
    assert (class_of(path), path.stat().st_nlink) == ("work", 1)
    cache = folder / ".cache" / "pip"
    cache.mkdir(parents=True)
    for number in range(40):
        os.link(path, cache / f"link{number}")
    assert class_of(path) == "work"
    path.unlink()
    assert class_of(cache / "link0") == "cache"


def test_what_lies_in_a_renamed_folder_changes_its_class(shared: Mount, folder: pathlib.Path) -> None:
    before = totals(shared)
    plain = folder / "plain"
    files = {
        "notes.txt": write(plain / "notes.txt"),
        "s.jsonl": write(plain / "deep" / "s.jsonl"),
        "d": write(plain / "deep" / "er" / "d"),
    }
    inner = {name: path.relative_to(plain) for name, path in files.items()}
    os.symlink("notes.txt", plain / "link")

    def classes(place: pathlib.Path) -> dict[str, str]:
        return {name: class_of(place / path) for name, path in inner.items()}

    usual = {"notes.txt": "work", "s.jsonl": "journal", "d": "work"}
    assert classes(plain) == usual
    os.rename(plain, folder / ".ssh")
    assert classes(folder / ".ssh") == dict.fromkeys(inner, "host")
    assert {"notes.txt", "s.jsonl", "d", "deep", "er", "link"} <= names_in(shared, "private_dentry")
    (folder / ".cache").mkdir()
    os.rename(folder / ".ssh", folder / ".cache" / "pip")
    assert classes(folder / ".cache" / "pip") == dict.fromkeys(inner, "cache")
    os.rename(folder / ".cache" / "pip", plain)
    assert classes(plain) == usual
    assert not {"notes.txt", "s.jsonl", "d", "deep", "er", "link"} & names_in(shared, "private_dentry")
    after = totals(shared)
    size = len(b"content\n")
    grown = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
    assert grown == {"work": (2, 2 * size), "journal": (1, size), "host": (0, 0), "cache": (0, 0)}


def test_names_of_host_and_cache_files_are_private(shared: Mount, folder: pathlib.Path) -> None:
    for name in (".ssh/secret-name", ".netrc", ".cache/pip/cached-name", "public-name", "public.jsonl"):
        write(folder / name)
    os.symlink("anything", folder / ".ssh" / "secret-link")
    os.mkdir(folder / ".ssh" / "secret-folder")
    private = {".ssh", "secret-name", ".netrc", "cached-name", "secret-link", "secret-folder"}
    assert private <= names_in(shared, "private_dentry")
    assert not private & names_in(shared, "dentry")
    assert {"public-name", "public.jsonl", folder.name} <= names_in(shared, "dentry")
    os.rename(folder / ".ssh" / "secret-name", folder / "now-public")
    os.rename(folder / "public-name", folder / ".ssh" / "now-secret")
    assert "now-public" in names_in(shared, "dentry")
    assert "now-secret" in names_in(shared, "private_dentry")
    shared.remount()
    assert sorted(os.listdir(folder / ".ssh")) == ["now-secret", "secret-folder", "secret-link"]
    assert class_of(folder / ".ssh" / "now-secret") == "host"


def test_a_class_is_no_matter_of_a_mode(folder: pathlib.Path) -> None:
    """Only regular files have one."""
    os.mkfifo(folder / "x.jsonl")
    assert stat.S_ISFIFO((folder / "x.jsonl").stat().st_mode)
    (folder / "d.jsonl").mkdir()
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(folder / "d.jsonl", "user.deltapool.class")
