"""Damage, done by hand to a copy of a state folder: one function for each kind that fsck must find."""

import os
import pathlib
import sqlite3
from collections.abc import Callable
from typing import NamedTuple


class Volume(NamedTuple):
    """A copy of a state folder that nobody holds, and its namespace, open for an editor."""

    state: pathlib.Path
    database: sqlite3.Connection

    def run(self, statement: str, *values: object) -> None:
        assert self.database.execute(statement, values).rowcount != 0, statement

    def inode(self, path: str) -> int:
        here = 1
        for name in path.split("/"):
            (here,) = self.database.execute(
                """SELECT ino FROM dentry WHERE parent = ?1 AND name = ?2
                UNION SELECT ino FROM private_dentry WHERE parent = ?1 AND name = ?2""",
                (here, name.encode()),
            ).fetchone()
        return int(here)

    def live(self, path: str) -> pathlib.Path:
        inode = self.inode(path)
        return self.state / "live" / f"{inode % 256:02x}" / str(inode)

    def note_live(self) -> None:
        """What is noted of live files fits them as they are now."""
        for (inode,) in self.database.execute("SELECT ino FROM live").fetchall():
            status = (self.state / "live" / f"{inode % 256:02x}" / str(inode)).stat()
            values = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, inode)
            self.database.execute("UPDATE live SET size = ?, mtime = ?, ctime = ? WHERE ino = ?", values)


Damage = Callable[[Volume], tuple[str, str | int, str]]
DAMAGES: dict[str, Damage] = {}
"""Each does its damage and tells which kind is to be found, the inode (or a path to it before), and the path."""


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


@damage
def a_root_is_missing(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("DELETE FROM inode WHERE ino = 1")
    return "root", 1, "."


@damage
def a_name_leads_nowhere(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE dentry SET ino = 77 WHERE ino = ?", volume.inode("plain"))
    return "dangling", 77, "plain"


@damage
def a_private_name_leads_nowhere(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE private_dentry SET ino = 77 WHERE ino = ?", volume.inode(".cache/pip/wheel"))
    return "dangling", 77, ".cache/pip/wheel"


@damage
def a_name_lies_in_a_file(volume: Volume) -> tuple[str, str | int, str]:
    inode, parent = volume.inode("work/big.sum"), volume.inode("plain")
    volume.run("UPDATE dentry SET parent = ? WHERE ino = ?", parent, inode)
    return "parent", inode, "plain/big.sum"


@damage
def a_name_is_empty(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = x'' WHERE ino = ?", inode)
    return "name", inode, "work/"


@damage
def a_name_holds_a_slash(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = CAST('../x' AS BLOB) WHERE ino = ?", inode)
    return "name", inode, "work/../x"


@damage
def a_name_holds_a_nul(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = x'610062' WHERE ino = ?", inode)
    return "name", inode, "work/a\0b"


@damage
def a_name_is_a_dot(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = x'2e' WHERE ino = ?", inode)
    return "name", inode, "work/."


@damage
def a_name_is_too_long(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = ? WHERE ino = ?", b"n" * 256, inode)
    return "name", inode, "work/" + "n" * 256


@damage
def a_name_is_a_text(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("UPDATE dentry SET name = 'text' WHERE ino = ?", inode)
    return "name", inode, "work/text"


@damage
def a_name_is_in_both_tables(volume: Volume) -> tuple[str, str | int, str]:
    inode, parent = volume.inode(".cache/pip/wheel"), volume.inode("work")
    volume.run("UPDATE private_dentry SET parent = ?, name = CAST('big.sum' AS BLOB) WHERE ino = ?", parent, inode)
    return "name", inode, "work/big.sum"


@damage
def an_id_is_in_both_tables(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode(".cache/pip/wheel")
    volume.run("UPDATE private_dentry SET id = (SELECT max(id) FROM dentry) WHERE ino = ?", inode)
    return "name", inode, ".cache/pip/wheel"


@damage
def nlink_of_a_file_is_wrong(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET nlink = 3 WHERE ino = ?", volume.inode("plain"))
    return "links", "plain", "plain"


@damage
def an_inode_has_no_name(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("plain")
    volume.run("DELETE FROM dentry WHERE ino = ?", inode)
    return "links", inode, f"live/{inode % 256:02x}/{inode}"


@damage
def an_inode_has_no_name_and_knows_it(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET nlink = 0 WHERE ino = ?", volume.inode("plain"))
    return an_inode_has_no_name(volume)


@damage
def nlink_of_a_directory_is_wrong(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET nlink = 2 WHERE ino = ?", volume.inode("work"))
    return "links", "work", "work"


@damage
def a_directory_has_two_names(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/deep")
    volume.run("INSERT INTO dentry VALUES (1 << 40, 1, CAST('second' AS BLOB), ?, 1)", inode)
    return "links", inode, "work/deep"


@damage
def a_directory_lies_in_itself(volume: Volume) -> tuple[str, str | int, str]:
    work, deep = volume.inode("work"), volume.inode("work/deep")
    volume.run("UPDATE dentry SET parent = ? WHERE ino = ?", deep, work)
    return "unreachable", deep, "?/work/deep"


@damage
def an_inode_number_is_still_to_come(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE meta SET value = ? WHERE key = 'next_ino'", volume.inode("work/big.sum"))
    return "number", "work/big.sum", "work/big.sum"


@damage
def a_mode_is_none(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET mode = 7 WHERE ino = ?", volume.inode("fifo"))
    return "type", "fifo", "fifo"


@damage
def a_class_is_none(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET class = 4 WHERE ino = ?", volume.inode("fifo"))
    return "type", "fifo", "fifo"


@damage
def a_secret_has_a_name_that_travels(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode(".ssh/id_ed25519")
    volume.run("INSERT INTO dentry SELECT *, 1 FROM private_dentry WHERE name = CAST('key' AS BLOB)")
    volume.run("DELETE FROM private_dentry WHERE name = CAST('key' AS BLOB)")
    return "private", inode, "work/key"


@damage
def work_has_no_name_that_travels(volume: Volume) -> tuple[str, str | int, str]:
    inode = volume.inode("work/big.sum")
    volume.run("INSERT INTO private_dentry SELECT id, parent, name, ino FROM dentry WHERE ino = ?", inode)
    volume.run("DELETE FROM dentry WHERE ino = ?", inode)
    return "private", inode, "work/big.sum"


@damage
def a_symlink_has_no_target(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("DELETE FROM symlink WHERE ino = ?", volume.inode("logs/link"))
    return "symlink", "logs/link", "logs/link"


@damage
def a_file_has_a_target(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO symlink VALUES (?, x'61', 1)", volume.inode("plain"))
    return "symlink", "plain", "plain"


@damage
def an_attribute_has_no_inode(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO xattr VALUES (777, CAST('user.a' AS BLOB), x'', 1)")
    return "xattr", 777, "live/09/777"


@damage
def an_attribute_is_not_the_users(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO xattr VALUES (?, CAST('security.a' AS BLOB), x'', 1)", volume.inode("plain"))
    return "xattr", "plain", "plain"


@damage
def a_directory_is_dirty(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO dirty VALUES (?, 1)", volume.inode("work"))
    return "note", "work", "work"


@damage
def work_is_noted_as_a_journal(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO segment VALUES (?, 0, x'', 0)", volume.inode("plain"))
    return "note", "plain", "plain"


@damage
def a_living_file_has_a_grave(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO grave VALUES (?)", volume.inode("plain"))
    return "note", "plain", "plain"


@damage
def nothing_is_noted_of_a_live_file(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("DELETE FROM live WHERE ino = ?", volume.inode("plain"))
    return "note", "plain", "plain"


@damage
def nothing_is_noted_of_a_journal(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("DELETE FROM journal WHERE ino = ?", volume.inode("logs/short.jsonl"))
    return "note", "logs/short.jsonl", "logs/short.jsonl"


@damage
def a_live_file_is_missing(volume: Volume) -> tuple[str, str | int, str]:
    volume.live("plain").unlink()
    return "missing", "plain", "plain"


@damage
def the_live_file_of_a_dirty_inode_is_missing(volume: Volume) -> tuple[str, str | int, str]:
    """After a clean end there is no reason for it."""
    volume.run("INSERT INTO dirty VALUES (?, 1)", volume.inode("plain"))
    return a_live_file_is_missing(volume)


@damage
def a_live_file_has_grown(volume: Volume) -> tuple[str, str | int, str]:
    with open(volume.live("plain"), "ab") as file:
        file.write(b"more")
    return "changed", "plain", "plain"


@damage
def a_live_file_was_changed_and_its_mtime_set_back(volume: Volume) -> tuple[str, str | int, str]:
    live = volume.live("work/big")
    mtime = live.stat().st_mtime_ns
    with open(live, "r+b") as file:
        file.write(b"other")
    os.utime(live, ns=(mtime, mtime))
    return "changed", "work/big", "work/big"


@damage
def a_live_file_is_a_symlink(volume: Volume) -> tuple[str, str | int, str]:
    live = volume.live("plain")
    live.rename(volume.state.parent / "elsewhere")
    live.symlink_to(volume.state.parent / "elsewhere")
    return "undeclared", 0, str(live.relative_to(volume.state))


@damage
def a_size_is_wrong(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE inode SET size = size + 1 WHERE ino = ?", volume.inode("plain"))
    return "size", "plain", "plain"


@damage
def a_bit_of_a_journal_has_flipped(volume: Volume) -> tuple[str, str | int, str]:
    with open(volume.live("logs/short.jsonl"), "r+b") as file:
        file.write(b"\xfb")
    volume.note_live()
    return "journal", "logs/short.jsonl", "logs/short.jsonl"


@damage
def a_journal_is_longer_than_noted(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE journal SET length = length - 1 WHERE ino = ?", volume.inode("logs/short.jsonl"))
    return "journal", "logs/short.jsonl", "logs/short.jsonl"


@damage
def lines_are_miscounted(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE journal SET lines = lines + 1 WHERE ino = ?", volume.inode("logs/short.jsonl"))
    return "journal", "logs/short.jsonl", "logs/short.jsonl"


@damage
def nuls_are_not_noted(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE journal SET nuls = 0 WHERE ino = ?", volume.inode("logs/nuls.jsonl"))
    return "journal", "logs/nuls.jsonl", "logs/nuls.jsonl"


@damage
def a_hole_is_not_noted(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE journal SET nuls = 0 WHERE ino = ?", volume.inode("logs/stretched.jsonl"))
    return "journal", "logs/stretched.jsonl", "logs/stretched.jsonl"


@damage
def a_segment_is_another(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("UPDATE segment SET digest = zeroblob(16) WHERE ino = ?", volume.inode("logs/long.jsonl"))
    return "journal", "logs/long.jsonl", "logs/long.jsonl"


@damage
def a_segment_is_too_much(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("INSERT INTO segment VALUES (?, 0, zeroblob(16), 0)", volume.inode("logs/short.jsonl"))
    return "journal", "logs/short.jsonl", "logs/short.jsonl"


@damage
def a_live_file_has_no_inode(volume: Volume) -> tuple[str, str | int, str]:
    (volume.state / "live" / "09" / "777").write_text("whose?")
    return "orphan", 777, "live/09/777"


@damage
def a_directory_has_a_live_file(volume: Volume) -> tuple[str, str | int, str]:
    live = volume.live("work")
    live.write_text("what?")
    return "orphan", "work", str(live.relative_to(volume.state))


@damage
def a_rewrite_is_left_of_nothing(volume: Volume) -> tuple[str, str | int, str]:
    live = volume.live("plain")
    live.with_name(f"{live.name}.new").write_text("what?")
    return "orphan", "plain", f"{live.relative_to(volume.state)}.new"


@damage
def a_live_file_is_in_the_wrong_folder(volume: Volume) -> tuple[str, str | int, str]:
    (volume.state / "live" / "08" / "777").write_text("whose?")
    return "undeclared", 777, "live/08/777"


@damage
def a_file_is_not_ours(volume: Volume) -> tuple[str, str | int, str]:
    (volume.state / "live" / "08" / "notes.txt").write_text("mine")
    return "undeclared", 0, "live/08/notes.txt"


@damage
def a_folder_is_not_ours(volume: Volume) -> tuple[str, str | int, str]:
    (volume.state / "backup").mkdir()
    return "undeclared", 0, "backup"


@damage
def a_page_is_garbage(volume: Volume) -> tuple[str, str | int, str]:
    (page,) = volume.database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'dentry_ino'").fetchone()
    volume.database.close()
    with open(volume.state / "namespace.db", "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    return "namespace", 0, "namespace.db"


@damage
def an_index_lacks_a_row(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("CREATE TABLE other(parent, id)")
    volume.run("PRAGMA writable_schema = 1")
    volume.run("UPDATE sqlite_master SET tbl_name = 'dentry' WHERE name = 'other'")
    volume.database.execute("DROP INDEX dentry_order")
    volume.run("INSERT INTO sqlite_master SELECT 'index', 'dentry_order', 'dentry', rootpage, "
               "'CREATE INDEX dentry_order ON dentry(parent, id)' FROM sqlite_master WHERE name = 'other'")  # fmt: skip
    return "namespace", 0, "namespace.db"


@damage
def a_namespace_is_cut_off(volume: Volume) -> tuple[str, str | int, str]:
    volume.database.close()
    os.truncate(volume.state / "namespace.db", 5 * 4096 + 17)
    return "namespace", 0, "namespace.db"


@damage
def a_namespace_is_something_else(volume: Volume) -> tuple[str, str | int, str]:
    volume.database.close()
    (volume.state / "namespace.db").write_bytes(b"something else" * 1000)
    return "namespace", 0, "namespace.db"


@damage
def a_table_is_missing(volume: Volume) -> tuple[str, str | int, str]:
    volume.run("DROP TABLE grave")
    return "namespace", 0, "namespace.db"
