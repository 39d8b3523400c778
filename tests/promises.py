"""The judge: what a crash left of a workload, held against what was promised.

*Names.* Some tree that the workload went through is there, exactly: everything up to some operation and nothing after
it. So a rename is done or not done. That operation is not older than the last change of any name that an fsync covered;
after kill -9, moreover, no more than `UNCOMMITTED_MAX` acknowledged changes of names are missing.

*Bytes*, in that tree. The floor of a file is its last version that must be there: the last one covered by an fsync, or
by the rename that put it in the place of another file. After kill -9 also the last one acknowledged whose bytes went in
place, since they are in the page cache.
A work file is wholly one of its versions from the floor on. Without a floor it may be a part of its first one, with
NULs for what is lost behind it. So may what will be a journal once it is renamed to the name of one.
A journal is a prefix of one of its versions from the floor on, not shorter than what all versions since the floor have
in common. It holds no NUL. A journal that only grew is thus a prefix of what was written with everything that was
synced. Every slot has a value that was written at or after the floor.
st_size is the number of bytes that can be read, for every file.
"""

import dataclasses
import os
import pathlib
import stat

from workload import SLOT_BYTES, SLOTS, File, Script, Tree

from deltapool.fs.fold import common_prefix

UNCOMMITTED_MAX = 64  # operations on names; docs/semantics.md

Found = dict[str, tuple[str, int | str, bytes]]  # path -> (kind, inode or target, content)


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker came: the last operation that it began, and the last that was acknowledged. -1 for none."""

    begun: int
    done: int


def progress(log: pathlib.Path) -> Progress:
    last = {"b": -1, "d": -1}
    if log.exists():
        for line in log.read_text().splitlines():
            word, number = line.split()
            last[word] = int(number)
    return Progress(last["b"], last["d"])


def look(root: pathlib.Path) -> Found:
    """Everything below a directory. Reads every file, and holds its size against what stat says."""
    found: Found = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            where = os.path.relpath(path, root)
            if stat.S_ISDIR(status.st_mode):
                found[where] = ("dir", status.st_ino, b"")
            elif stat.S_ISLNK(status.st_mode):
                found[where] = ("link", os.readlink(path), b"")
            else:
                content = pathlib.Path(path).read_bytes()
                assert len(content) == status.st_size, f"{where}: st_size {status.st_size}, {len(content)} bytes"
                found[where] = ("file", status.st_ino, content)
    return found


def judge(seed: str, reached: Progress, found: Found, *, killed: bool) -> None:
    """Raises AssertionError unless every promise is kept. `killed`: the daemon died, the machine did not."""
    script = Script(seed)
    for _ in range(reached.begun + 1):
        script.step()
    least = _names_floor(script, reached, killed=killed)
    complaints = []
    for at, tree in reversed(script.trees):
        if at < least:
            break
        complaint = _names_differ(tree, found) or _contents_differ(script, reached, at, tree, found, killed=killed)
        if complaint is None:
            return
        complaints.append(f"after operation {at}: {complaint}")
    nearest = "\n  ".join(complaints[:8])
    raise AssertionError(
        f"seed {seed!r}, {reached}: this is no tree of operation {least} or later; compared with those\n  {nearest}"
    )


def _names_floor(script: Script, reached: Progress, *, killed: bool) -> int:
    """The oldest operation whose tree may be the one that is there."""
    synced = [each for file in script.files.values() for each in file.synced] + script.directory_synced
    least = max([-1, *(each.names for each in synced if each.at <= reached.done)])
    if killed:
        acknowledged = [at for at, _ in script.trees if at <= reached.done]
        least = max(least, *acknowledged[: max(1, len(acknowledged) - UNCOMMITTED_MAX)])
    return max(at for at, _ in script.trees if at <= least)


def _names_differ(tree: Tree, found: Found) -> str | None:
    if tree.keys() != found.keys():
        return f"missing {sorted(tree.keys() - found.keys())}, unknown {sorted(found.keys() - tree.keys())}"
    numbers: dict[int | str, int | str] = {}
    for path, (kind, number) in tree.items():
        if found[path][0] != kind or (kind == "link" and found[path][1] != number):
            return f"{path} is {found[path][:2]}, not {(kind, number)}"
        if kind == "file" and numbers.setdefault(number, found[path][1]) != found[path][1]:
            return f"{path} is no hard link any more"
    return None


def _contents_differ(
    script: Script, reached: Progress, at: int, tree: Tree, found: Found, *, killed: bool
) -> str | None:
    for path, (kind, number) in tree.items():
        if kind == "file":
            file = script.files[int(number)]
            floor, content = _floor(file, reached, at, killed=killed), found[path][2]
            if not path.endswith(".jsonl") and (floor is None or file.kind == "journal"):
                content = content.partition(b"\0")[0]  # the filesystem below may keep a length without its bytes
            complaint = _differs(file, floor, content)
            if complaint is not None:
                return f"{path} ({file.kind}): {complaint}"
    return None


def _floor(file: File, reached: Progress, at: int, *, killed: bool) -> int | None:
    """The number of the oldest version that the file may have in the tree of operation `at`."""
    must = [each.version for each in file.synced if each.at <= reached.done]
    must += [each.version for each in file.replaced_at if each.at <= at]
    if killed:
        must += [n for n, version in enumerate(file.versions) if version.in_place and version.done <= reached.done]
    return max(must, default=None)


def _differs(file: File, floor: int | None, content: bytes) -> str | None:
    if file.kind == "journal":
        return _journal_differs(file, floor, content)
    if file.kind == "slots":
        return _slots_differ(file, floor, content)
    if any(version.content == content for version in file.versions[floor or 0 :]):
        return None
    if floor is None and file.versions[0].content.startswith(content):
        return None
    return f"{_shape(content)}, neither wholly old nor wholly new: " + _versions(file, floor)


def _journal_differs(file: File, floor: int | None, content: bytes) -> str | None:
    if b"\0" in content:
        return f"a NUL at {content.index(0)}"
    versions = file.versions[floor or 0 :]
    common = 0 if floor is None else len(versions[0].content)
    for earlier, version in zip([versions[0], *versions], versions, strict=False):
        common = min(common, _common_prefix(earlier.content, version.content))
        if len(content) >= common and version.content.startswith(content):
            return None
    return f"{_shape(content)} is no prefix, or too short a one, of any: " + _versions(file, floor)


def _slots_differ(file: File, floor: int | None, content: bytes) -> str | None:
    if floor is None and file.versions[0].content.startswith(content):
        return None
    if len(content) != SLOTS * SLOT_BYTES:
        return f"{len(content)} bytes"
    for start in range(0, len(content), SLOT_BYTES):
        value = content[start : start + SLOT_BYTES]
        if all(version.content[start : start + SLOT_BYTES] != value for version in file.versions[floor or 0 :]):
            return f"slot {start // SLOT_BYTES} has {value[:20]!r}, which is lost or too old"
    return None


def _common_prefix(one: bytes, two: bytes) -> int:
    return common_prefix(one, two)


def _shape(content: bytes) -> str:
    return f"{len(content)} bytes beginning with {content[:40]!r}"


def _versions(file: File, floor: int | None) -> str:
    each = (f"{number}: {_shape(version.content)}" for number, version in enumerate(file.versions))
    return f"floor {floor}; " + "; ".join(list(each)[-8:])
