"""docs/format.md is what is on the disk: every file, table, column, key, number and command, and nothing else."""

import json
import pathlib
import random
import re
import stat
from collections.abc import Iterator
from typing import Any

import apsw
import pytest
from mounting import Mount, wait_until
from trees import fill, namespace

from deltapool.cas.digest import DIGEST_BYTES, SEGMENT_BYTES, digest_bytes
from deltapool.fs import control, database, fsck, state
from deltapool.fs.classes import FileClass
from deltapool.fs.config import Limits
from deltapool.fs.inode import ROOT, Ino
from deltapool.fs.livefile import NEW, relative_path
from deltapool.fs.namespace import CUT, EPOCH_SHIFT, INODE_GAP

TEXT = (pathlib.Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
KINDS = ("shared", "local", "private")


def chapter(title: str) -> str:
    """The text below a heading, down to the next one of its rank or a higher one."""
    rank = title.partition(" ")[0]
    after = TEXT.split(f"\n{title}\n")[1]
    return re.split(rf"\n#{{1,{len(rank)}}} ", after)[0]


def table(text: str, header: str) -> list[list[str]]:
    """The rows of the table that has this header, cells without backquotes."""
    lines = text[text.index(f"| {header} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in re.split(r" \| ", line.strip("| "))] for line in lines[2:]]


def declared() -> dict[str, str]:
    """Path, with its tokens, → type."""
    return {row[0]: row[1] for row in table(chapter("## The state folder"), "path | type | what it is")}


def tables() -> dict[str, tuple[str, list[str]]]:
    """Table → its kind and columns, in order."""
    found = {}
    for heading in re.finditer(r"^### `(\w+)` – (\w+)$", chapter("## namespace.db"), re.MULTILINE):
        text = chapter(heading[0])
        found[heading[1]] = (heading[2], [row[0] for row in table(text, "column | meaning")])
    return found


@pytest.fixture
def schema() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    connection.execute(database.SCHEMA)
    yield connection
    connection.close()


# Constants


def test_the_document_names_the_versions() -> None:
    versions = [row[0] for row in table(chapter("## Versions"), "format | since | change")]
    assert versions == [str(number) for number in range(1, database.FORMAT + 1)]
    assert database.FORMAT == state.FORMAT
    assert f"`application_id` {database.APPLICATION_ID:#x}, `user_version` {database.FORMAT}" in TEXT
    assert f"## The control protocol, version {control.VERSION}" in TEXT
    assert f"always {CUT}, there are none yet" in TEXT


def test_the_document_names_every_table_and_column(schema: apsw.Connection) -> None:
    names = [row[0] for row in schema.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    made = {name: [row[1] for row in schema.execute(f"PRAGMA table_info({name})")] for name in names}
    assert {name: columns for name, (_, columns) in tables().items()} == made
    assert {kind for kind, _ in tables().values()} <= set(KINDS)
    assert [name for name, (kind, _) in tables().items() if kind == "private"] == ["private_dentry"]


def test_a_row_belongs_to_a_cut_just_if_it_is_shared() -> None:
    assert {name for name, (_, columns) in tables().items() if "cut" in columns} == {
        name for name, (kind, _) in tables().items() if kind == "shared"
    }


def test_the_document_names_every_index(schema: apsw.Connection) -> None:
    for (name,) in schema.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"):
        assert f"`{name}`" in chapter("## namespace.db"), name


def test_the_document_names_the_classes() -> None:
    rows = table(chapter("### `inode` – shared"), "class | number | its names | its bytes")
    assert {row[0]: int(row[1]) for row in rows} == {each.label: each.value for each in FileClass}


def test_the_document_numbers_inodes() -> None:
    assert f"{ROOT} is the root, all others are at least epoch << {EPOCH_SHIFT}" in TEXT
    assert f"2^{INODE_GAP.bit_length() - 1} numbers are left out" in TEXT
    assert 1 << (INODE_GAP.bit_length() - 1) == INODE_GAP
    assert "inode 42 is `live/2a/42`" in TEXT
    assert relative_path(Ino(42)) == "2a/42"
    assert NEW == ".new"


def test_the_document_digests_as_the_code_does() -> None:
    rows = table(chapter("## The digest of a journal"), "content | digest")
    contents = {"nothing": b"", "hello and a newline": b"hello\n", "1,048,577 NULs": bytes(SEGMENT_BYTES + 1)}
    assert {row[0].replace("`", ""): row[1] for row in rows} == {
        name: digest_bytes(content).hex() for name, content in contents.items()
    }
    assert f"{SEGMENT_BYTES >> 20} MiB" in chapter("## The digest of a journal")
    assert f"{DIGEST_BYTES} bytes" in chapter("## The digest of a journal")


def test_the_document_declares_the_files_that_fsck_knows() -> None:
    assert declared() == fsck.FILES
    for name in (state.STATE_FILE, state.LOCK_FILE, state.NAMESPACE_FILE, state.CONTROL_SOCKET):
        assert name in declared()
    assert {state.LOG_FOLDER, f"{state.LOG_FOLDER}/{state.LOG_FILE}", state.LOST_FOLDER} < set(declared())
    assert f"{state.LIVE_FOLDER}/<hh>/<ino>{NEW}" in declared()


# A volume that is used


def undeclared(folder: pathlib.Path) -> list[str]:
    """What lies in a state folder and is not in the document. The tokens are read as the document explains them."""
    tokens = {"<hh>": "[0-9a-f][0-9a-f]", "<ino>": "[0-9]+", "<n>": f"[1-{Limits().log_files}]"}
    patterns = {}
    for name, kind in declared().items():
        pattern = re.escape(name)
        for token, meaning in tokens.items():
            pattern = pattern.replace(re.escape(token), meaning)
        patterns[pattern] = kind
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFSOCK: "socket"}
    found = []
    for path in folder.rglob("*"):
        name, kind = str(path.relative_to(folder)), kinds[stat.S_IFMT(path.lstat().st_mode)]
        if kind not in {patterns[pattern] for pattern in patterns if re.fullmatch(pattern, name)}:
            found.append(f"{name} ({kind})")
    return found


def test_a_used_volume_holds_nothing_that_is_not_declared(tmp_path: pathlib.Path) -> None:
    """Mounted, within a rewrite, killed, mounted with something to set aside, with logs that are full, unmounted."""
    with Mount(tmp_path / "mount", tmp_path / "state", "[limits]\nlog_bytes = 100\n") as mounted:
        fill(mounted.path, random.Random(1))
        assert undeclared(mounted.state) == []
        for name in ("plain", "work/big"):
            open(mounted.path / name, "wb").close()
        with open(mounted.path / "work" / "big.sum", "wb"):
            assert undeclared(mounted.state) == []
            mounted.kill()
        assert undeclared(mounted.state) == []
        leftover = 1 << EPOCH_SHIFT | 4095
        (mounted.state / "live" / "ff" / str(leftover)).write_text("its creation was not committed")
        mounted.start()
        wait_until(lambda: (mounted.state / "lost" / str(leftover)).exists(), "the end of the audit")
        assert undeclared(mounted.state) == []
        mounted.crash()  # and something is said for the second time
        assert (mounted.state / "log" / "deltapool.log.1").exists()
        mounted.stop()
        assert undeclared(mounted.state) == []
        (mounted.state / "live" / "00" / "notes").touch()
        (mounted.state / "backup").mkdir()
        assert sorted(undeclared(mounted.state)) == ["backup (folder)", "live/00/notes (file)"]


def test_the_namespace_of_a_used_volume_holds_what_is_declared(tmp_path: pathlib.Path) -> None:
    keys = {row[0] for row in table(chapter("### `meta` – local"), "key | value")}
    with Mount(tmp_path / "mount", tmp_path / "state") as mounted:
        (mounted.path / "a.jsonl").write_text("x\n")
        (mounted.path / "a.jsonl").unlink()
        (mounted.path / "b").write_text("x")
        mounted.stop()
    connection = namespace(mounted.state)
    meta = dict(connection.execute("SELECT CAST(key AS TEXT), value FROM meta").fetchall())
    assert {key.decode() for key in meta} == keys
    assert (meta[b"epoch"], meta[b"clean"]) == (1, 1)
    assert len(json.loads(meta[b"gone"])) == 4
    assert connection.execute("PRAGMA application_id").fetchone() == (database.APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (database.FORMAT,)
    assert connection.execute("PRAGMA page_size").fetchone() == (4096,)
    assert "pages of 4,096" in TEXT
    inodes = [row[0] for row in connection.execute("SELECT ino FROM inode WHERE ino != 1")]
    connection.close()
    assert inodes
    assert min(inodes) >= 1 << EPOCH_SHIFT
    content = json.loads((mounted.state / "state.json").read_text())
    assert set(content) == {"format", "volume", "id"}
    assert all(f"`{key}`" in chapter("## The state folder") for key in content)
    assert stat.S_IMODE(mounted.state.stat().st_mode) == 0o700
    files = list(mounted.state.glob("live/*/*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_the_control_protocol_answers_as_declared(mount: Mount) -> None:
    (mount.path / "a.jsonl").write_text("x\n")
    rows = {row[0]: row[2] for row in table(chapter("## The control protocol, version 1"), "command | does | result")}
    for command, result in rows.items():
        answer = control.call(mount.state, command, 30)
        said = set(re.findall(r"`(\w+)`", f"`{result}`"))  # the table's reader took the outer quotes
        assert keys(answer) <= said, command
        assert said <= keys(answer), command
    limit = Limits().control_request_bytes
    assert f"at most {limit:,} bytes" in chapter("## The control protocol, version 1")
    with pytest.raises(Exception, match="unknown request"):
        control.call(mount.state, "nonsense", 30)


def keys(answer: Any) -> set[str]:
    if isinstance(answer, dict):
        return set(answer) | {key for value in answer.values() for key in keys(value)}
    return {key for each in answer for key in keys(each)} if isinstance(answer, list) else set()


def test_every_command_of_the_server_is_declared() -> None:
    source = (pathlib.Path(__file__).parent.parent / "fs" / "mount.py").read_text()
    handled = re.findall(r'"(\w+)": parts\.report\.\w+', source)
    rows = table(chapter("## The control protocol, version 1"), "command | does | result")
    assert sorted(row[0] for row in rows) == sorted(handled)
