"""What must hold within the tables of a namespace, whatever the live files say: for each rule a query for breaches.

A query gives (inode, parent, name, …): the name that is meant, or nulls where any name of the inode serves, and what
the message wants. The rule file of the classes is not known here; what holds under any rule file is checked.
"""

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from deltapool.fs.namespace import EPOCH_SHIFT

DAMAGES_SHOWN = 100  # of those that SQLite itself finds


class Rule(NamedTuple):
    kind: str
    message: str
    query: str


class Breach(NamedTuple):
    """`parent` and `name` say which name of the inode is meant, if one is."""

    kind: str
    inode: int
    parent: int | None
    name: bytes | None
    message: str


_NAMES = "((SELECT count(*) FROM dentry WHERE ino = i.ino) + (SELECT count(*) FROM private_dentry WHERE ino = i.ino))"
_SUBDIRECTORIES = """(
  (SELECT count(*) FROM dentry n JOIN inode c ON c.ino = n.ino WHERE n.parent = i.ino AND c.mode & 61440 = 16384) +
  (SELECT count(*) FROM private_dentry n JOIN inode c ON c.ino = n.ino
    WHERE n.parent = i.ino AND c.mode & 61440 = 16384))"""
_REACHED = """WITH RECURSIVE reached(ino) AS (SELECT 1
  UNION SELECT n.ino FROM reached r JOIN dentry n ON n.parent = r.ino
    JOIN inode c ON c.ino = n.ino WHERE c.mode & 61440 = 16384
  UNION SELECT n.ino FROM reached r JOIN private_dentry n ON n.parent = r.ino
    JOIN inode c ON c.ino = n.ino WHERE c.mode & 61440 = 16384)"""

_TREE = (
    Rule(
        "root",
        "the root is no directory",
        "SELECT 1, NULL, NULL WHERE NOT EXISTS(SELECT 1 FROM inode WHERE ino = 1 AND mode & 61440 = 16384)",
    ),
    Rule(
        "dangling",
        "the name leads to no inode",
        "SELECT n.ino, n.parent, n.name FROM name n LEFT JOIN inode i ON i.ino = n.ino WHERE i.ino IS NULL",
    ),
    Rule(
        "parent",
        "lies in inode {}, which is no directory",
        """SELECT n.ino, n.parent, n.name, n.parent FROM name n
        LEFT JOIN inode p ON p.ino = n.parent AND p.mode & 61440 = 16384 WHERE p.ino IS NULL""",
    ),
    Rule(
        "name",
        "no file can have this name",
        """SELECT ino, parent, name FROM name WHERE typeof(name) != 'blob' OR length(name) NOT BETWEEN 1 AND 255
        OR instr(name, x'2f') OR instr(name, x'00') OR name IN (x'2e', x'2e2e')""",
    ),
    Rule(
        "name",
        "the same name leads to inode {} too",
        """SELECT p.ino, p.parent, p.name, d.ino FROM private_dentry p
        JOIN dentry d ON d.parent = p.parent AND d.name = p.name""",
    ),
    Rule(
        "name",
        "its id {} is that of a name of inode {} too",
        "SELECT p.ino, p.parent, p.name, p.id, d.ino FROM private_dentry p JOIN dentry d ON d.id = p.id",
    ),
    Rule(
        "links",
        "nlink is {}, but it has {} names",
        f"SELECT i.ino, NULL, NULL, nlink, {_NAMES} FROM inode i WHERE mode & 61440 != 16384 AND nlink != {_NAMES}",
    ),
    Rule(
        "links",
        "it has no name",
        f"SELECT i.ino, NULL, NULL FROM inode i WHERE mode & 61440 != 16384 AND nlink = 0 AND {_NAMES} = 0",
    ),
    Rule(
        "links",
        "a directory with {} names",
        f"SELECT i.ino, NULL, NULL, {_NAMES} FROM inode i WHERE mode & 61440 = 16384 AND {_NAMES} != (ino != 1)",
    ),
    Rule(
        "links",
        "nlink is {}, but it has {} subdirectories",
        f"""SELECT i.ino, NULL, NULL, nlink, {_SUBDIRECTORIES} FROM inode i
        WHERE mode & 61440 = 16384 AND nlink != 2 + {_SUBDIRECTORIES}""",
    ),
    Rule(
        "unreachable",
        "no way leads here from the root",
        f"""{_REACHED} SELECT i.ino, NULL, NULL FROM inode i
        WHERE mode & 61440 = 16384 AND i.ino NOT IN reached AND {_NAMES} > 0""",
    ),
    Rule(
        "number",
        "this inode number has never been handed out: the next one is {}",
        f"""SELECT i.ino, NULL, NULL, m.value FROM inode i LEFT JOIN meta m ON m.key = 'next_ino'
        WHERE i.ino != 1 AND (i.ino < {1 << EPOCH_SHIFT} OR m.value IS NULL OR i.ino >= m.value)""",
    ),
    Rule(
        "type",
        "mode {:o} and class {}: no such thing",
        """SELECT ino, NULL, NULL, mode, class FROM inode
        WHERE mode >> 12 NOT IN (1, 2, 4, 6, 8, 10, 12) OR class NOT BETWEEN 0 AND 3""",
    ),
)

_PRIVACY = (
    Rule(
        "private",
        "the inode is {}, but this name of it could travel",
        """SELECT n.ino, n.parent, n.name, CASE i.class WHEN 3 THEN 'host' ELSE 'cache' END
        FROM dentry n JOIN inode i ON i.ino = n.ino WHERE i.class IN (2, 3)""",
    ),
    Rule(
        "private",
        "the inode may travel, but all of its names are private",
        """SELECT n.ino, n.parent, n.name FROM private_dentry n JOIN inode i ON i.ino = n.ino
        WHERE i.class IN (0, 1) AND NOT EXISTS(SELECT 1 FROM dentry d WHERE d.ino = n.ino)""",
    ),
)

_BELONGINGS = (
    Rule(
        "symlink",
        "it has no usable target",
        """SELECT i.ino, NULL, NULL FROM inode i LEFT JOIN symlink s ON s.ino = i.ino WHERE i.mode & 61440 = 40960
        AND (s.ino IS NULL OR typeof(s.target) != 'blob' OR length(s.target) = 0 OR instr(s.target, x'00'))""",
    ),
    Rule(
        "symlink",
        "a target, but no symlink",
        """SELECT s.ino, NULL, NULL FROM symlink s
        LEFT JOIN inode i ON i.ino = s.ino AND i.mode & 61440 = 40960 WHERE i.ino IS NULL""",
    ),
    Rule(
        "xattr",
        "the attribute {!r} is not one of user.*, or its inode is gone",
        """SELECT x.ino, NULL, NULL, x.name FROM xattr x LEFT JOIN inode i ON i.ino = x.ino
        WHERE i.ino IS NULL OR typeof(x.name) != 'blob' OR substr(x.name, 1, 5) != x'757365722e'""",
    ),
    Rule(
        "note",
        "noted as {}, but no regular file",
        """SELECT o.ino, NULL, NULL, o.note FROM
        (SELECT ino, 'live' AS note FROM live UNION ALL SELECT ino, 'dirty' FROM dirty) o
        LEFT JOIN inode i ON i.ino = o.ino AND i.mode & 61440 = 32768 WHERE i.ino IS NULL""",
    ),
    Rule(
        "note",
        "noted as {}, but no journal",
        """SELECT o.ino, NULL, NULL, o.note FROM
        (SELECT ino, 'journal' AS note FROM journal UNION ALL SELECT DISTINCT ino, 'segment' FROM segment) o
        LEFT JOIN inode i ON i.ino = o.ino AND i.mode & 61440 = 32768 AND i.class = 1 WHERE i.ino IS NULL""",
    ),
    Rule(
        "note",
        "it is there, but its bytes are marked for removal",
        "SELECT g.ino, NULL, NULL FROM grave g JOIN inode i ON i.ino = g.ino",
    ),
)

RULES = (*_TREE, *_PRIVACY, *_BELONGINGS)


def damages(connection: apsw.Connection) -> list[str]:
    """What SQLite finds wrong with its own file."""
    found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({DAMAGES_SHOWN})")]
    return [] if found == ["ok"] else found


def breaches(connection: apsw.Connection) -> Iterator[Breach]:
    """What breaks a rule. The connection, the caller's own, gets a temporary view `name`: the names of both tables."""
    connection.execute(
        """CREATE TEMP VIEW IF NOT EXISTS name AS
        SELECT id, parent, name, ino FROM dentry UNION ALL SELECT id, parent, name, ino FROM private_dentry"""
    )
    for rule in RULES:
        for inode, parent, name, *values in connection.execute(rule.query):
            yield Breach(rule.kind, inode, parent, name, rule.message.format(*values))


def path_of(connection: apsw.Connection, inode: int, parent: int | None = None, name: bytes | None = None) -> bytes:
    """The path of an inode below the volume's root, by the given name or by any.

    It begins with `?` if the root is not reached, and is empty if there is no name."""
    steps: list[bytes] = []
    seen: set[int] = set()
    here = inode
    while here != 1 and here not in seen:
        seen.add(here)
        if parent is None:
            row = connection.execute(
                """SELECT parent, name FROM dentry WHERE ino = ?1
                UNION ALL SELECT parent, name FROM private_dentry WHERE ino = ?1 LIMIT 1""",
                (here,),
            ).fetchone()
            if row is None:
                break
            parent, name = row
        steps.append(name if isinstance(name, bytes) else str(name).encode())
        assert parent is not None
        here, parent = parent, None
    if here != 1 and steps:
        steps.append(b"?")
    return b"/".join(reversed(steps))
