"""A random workload as a pure function of its seed, and what each of its operations promises.

`Script` makes the operations one by one and plays each on a model of the tree, so that the worker which executes them
(`worker`) and the judge who looks at the result after a crash (`promises`) agree on everything without a word. The
worker says only how far it came.

The model keeps what the judge needs: the tree after each operation that changed names, every version of every file,
what an fsync covered, and since when the names that lead to it were what they are.

Kinds of file: `journal` (*.jsonl: appended through several descriptors, rewritten whole, its end replaced, renamed
over), `work` (created, rewritten through O_TRUNC in one go or slowly, replaced by a temporary file; each version is
complete in itself) and `slots` (records of a fixed size, overwritten in place).
"""

import dataclasses
import os
import random
from collections.abc import Callable

SLOT_BYTES = 512
SLOTS = 8
CHUNK_BYTES = 8192  # old gptme writes its journals in such pieces
JOURNAL_BYTES_MAX = 48 << 10
NAMES_MAX = 40
DESCRIPTORS = 3  # kept open for each journal
TEMPORARY = ".tmp"


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    kind: str
    path: str
    to: str = ""
    data: bytes = b""
    number: int = 0  # of a descriptor or a slot, or a choice of the worker's


@dataclasses.dataclass(slots=True)
class Version:
    """The content of a file from operation `begun` on, wholly since `done`."""

    begun: int
    done: int
    content: bytes
    in_place: bool  # its bytes went into the live file that holds the earlier ones


@dataclasses.dataclass(slots=True)
class Synced:
    """An fsync: operation `at` made version `version` durable, and names that are the same since operation `names`."""

    at: int
    version: int
    names: int


@dataclasses.dataclass(slots=True)
class File:
    kind: str
    versions: list[Version] = dataclasses.field(default_factory=list)
    synced: list[Synced] = dataclasses.field(default_factory=list)
    replaced_at: list[Synced] = dataclasses.field(default_factory=list)  # renamed over another one: a sync of its bytes
    rewriting: list[bytes] | None = None  # pieces still to be written of a slow rewrite

    @property
    def content(self) -> bytes:
        return self.versions[-1].content


Tree = dict[str, tuple[str, int | str]]  # path -> ("dir", id) | ("file", id) | ("link", target)


class Script:
    """The workload of one seed, below one directory. `step` makes the next operation, and plays it on the model."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.at = -1  # the operation that was played last
        self.tree: Tree = {}
        self.trees: list[tuple[int, Tree]] = [(-1, {})]
        self.files: dict[int, File] = {}
        self.directory_synced: list[Synced] = []
        self.moved: dict[int, int] = {}  # when a name of an inode changed last
        self.entries_changed: dict[str, int] = {"": -1}  # when an entry of a directory changed last
        self._ids = iter(range(1, 1 << 30))
        self._words = iter(range(1 << 30))
        self._planned: list[Callable[[], Op | None]] = []

    def step(self) -> Op:
        self.at += 1
        op = self._next()
        getattr(self, f"_play_{op.kind}")(op)
        return op

    # --- choosing

    def _next(self) -> Op:
        while self._planned and self.random.random() < 0.6:
            op = self._planned.pop(0)()
            if op is not None:
                return op
        choices: list[tuple[int, Callable[[], Op | None]]] = [
            (30, self._append),
            (8, self._rewrite_journal),
            (3, self._edit_journal),
            (6, self._new_journal),
            (8, self._replace_journal),
            (10, self._new_work),
            (14, self._replace_work),
            (8, self._rewrite_work),
            (6, self._rewrite_slowly),
            (6, self._slot),
            (2, self._new_slots),
            (12, self._fsync),
            (4, self._fsync_directory),
            (4, self._mkdir),
            (2, self._rmdir),
            (5, self._rename),
            (3, self._rename_directory),
            (2, self._exchange),
            (3, self._link),
            (6, self._unlink),
            (2, self._symlink),
        ]
        while True:
            choose = self.random.choices([each for _, each in choices], [weight for weight, _ in choices])[0]
            op = choose()
            if op is not None:
                return op

    def _word(self) -> int:
        return next(self._words)

    def _paths(self, kind: str) -> list[str]:
        """Files of a kind that are not in the middle of something."""
        return [path for path, node in self.tree.items() if self._is(path, node, kind)]

    def _is(self, path: str, node: tuple[str, int | str], kind: str) -> bool:
        if node[0] != "file" or os.path.basename(path).startswith(TEMPORARY):
            return False
        file = self.files[int(node[1])]
        return file.kind == kind and file.rewriting is None

    def _pick(self, paths: list[str]) -> str | None:
        return self.random.choice(paths) if paths else None

    def _directory(self) -> str:
        return self.random.choice(["", *(path for path, node in self.tree.items() if node[0] == "dir")])

    def _new_path(self, form: str) -> str:
        return join(self._directory(), form.format(self._word()))

    def _line(self) -> bytes:
        size = self.random.choice((60, 200, 900, 2100, 5000))
        return b'{"n": %d, "text": "%s"}\n' % (self._word(), self.random.randbytes(size // 2).hex().encode())

    def _body(self) -> bytes:
        """Content that proves itself: it begins with its number and length, and no two are alike."""
        body = self.random.randbytes(self.random.choice((10, 600, 4000, 9000, 30_000))).hex().encode()
        return b"version %d of %d bytes\n%s\nend\n" % (self._word(), len(body), body)

    def _append(self) -> Op | None:
        path = self._pick([each for each in self._paths("journal") if len(self.file(each).content) < JOURNAL_BYTES_MAX])
        if path is None:
            return None
        lines = b"".join(self._line() for _ in range(self.random.choice((1, 1, 1, 3))))
        return Op("append", path, data=lines, number=self.random.randrange(DESCRIPTORS))

    def _rewrite_journal(self) -> Op | None:
        path = self._pick([each for each in self._paths("journal") if len(self.file(each).content) < JOURNAL_BYTES_MAX])
        return None if path is None else Op("rewrite", path, data=self.file(path).content + self._line())

    def _edit_journal(self) -> Op | None:
        path = self._pick([each for each in self._paths("journal") if self.file(each).content.count(b"\n") > 3])
        if path is None:
            return None
        lines = self.file(path).content.splitlines(keepends=True)
        kept = lines[: self.random.randrange(1, len(lines))]
        return Op("rewrite", path, data=b"".join(kept) + self._line())

    def _new_journal(self) -> Op | None:
        if len(self.tree) >= NAMES_MAX:
            return None
        return Op("create", self._new_path("j{}.jsonl"), to="journal", data=self._line())

    def _replace_journal(self) -> Op | None:
        """Temporary file without the suffix, then renamed over; sometimes with an fsync."""
        target = self._pick(self._paths("journal"))
        if target is None:
            return None
        return self._replace(target, "journal", self.file(target).content + self._line())

    def _new_work(self) -> Op | None:
        if len(self.tree) >= NAMES_MAX:
            return None
        return Op("create", self._new_path("f{}.txt"), to="work", data=self._body())

    def _replace_work(self) -> Op | None:
        target = self._pick(self._paths("work"))
        return None if target is None else self._replace(target, "work", self._body())

    def _replace(self, target: str, kind: str, content: bytes) -> Op:
        temporary = join(os.path.dirname(target), f"{TEMPORARY}{self._word()}")
        if self.random.random() < 0.3:
            self._planned.append(lambda: Op("fsync", temporary) if temporary in self.tree else None)
        self._planned.append(
            lambda: Op("rename", temporary, to=target) if temporary in self.tree and target in self.tree else None
        )
        return Op("create", temporary, to=kind, data=content)

    def _rewrite_work(self) -> Op | None:
        path = self._pick(self._paths("work"))
        return None if path is None else Op("rewrite", path, data=self._body())

    def _rewrite_slowly(self) -> Op | None:
        """O_TRUNC, pieces, close: each an operation, with others in between."""
        path = self._pick(self._paths("work"))
        if path is None:
            return None
        number = int(self.tree[path][1])
        self._planned += [lambda: self._piece(number)] * 3 + [lambda: self._finish(number)]
        return Op("begin", path, data=self._body())

    def _piece(self, number: int) -> Op | None:
        pieces = self.files[number].rewriting
        return Op("piece", "", data=pieces.pop(0), number=number) if pieces else None

    def _finish(self, number: int) -> Op:
        return Op("finish", "", data=b"".join(self.files[number].rewriting or []), number=number)

    def _slot(self) -> Op | None:
        path = self._pick(self._paths("slots"))
        if path is None:
            return None
        value = (b"%d." % self._word()) * SLOT_BYTES
        return Op("slot", path, data=value[:SLOT_BYTES], number=self.random.randrange(SLOTS))

    def _new_slots(self) -> Op | None:
        if len(self.tree) >= NAMES_MAX:
            return None
        return Op("create", self._new_path("s{}.db"), to="slots", data=b"-" * SLOT_BYTES * SLOTS)

    def _fsync(self) -> Op | None:
        path = self._pick([path for kind in ("journal", "work", "slots") for path in self._paths(kind)])
        return None if path is None else Op("fsync", path, number=self.random.randrange(2))

    def _fsync_directory(self) -> Op:
        return Op("fsyncdir", self._directory())

    def _mkdir(self) -> Op | None:
        return None if len(self.tree) >= NAMES_MAX else Op("mkdir", self._new_path("d{}"))

    def _rmdir(self) -> Op | None:
        path = self._pick([path for path, node in self.tree.items() if node[0] == "dir" and not self._below(path)])
        return None if path is None else Op("rmdir", path)

    def _below(self, directory: str) -> list[str]:
        return [path for path in self.tree if path.startswith(f"{directory}/")]

    def _rename(self) -> Op | None:
        """To a new name, for a journal one of a journal."""
        path = self._pick([path for kind in ("journal", "work", "slots") for path in self._paths(kind)])
        if path is None:
            return None
        return Op("rename", path, to=self._new_path(f"r{{}}{os.path.splitext(path)[1]}"))

    def _rename_directory(self) -> Op | None:
        path = self._pick([path for path, node in self.tree.items() if node[0] == "dir"])
        parent = self._directory()
        if path is None or f"{parent}/".startswith(f"{path}/"):
            return None
        return Op("rename", path, to=join(parent, f"d{self._word()}"))

    def _exchange(self) -> Op | None:
        work = self._paths("work")
        if len(work) < 2:
            return None
        one, two = self.random.sample(work, 2)
        return Op("exchange", one, to=two) if self.tree[one] != self.tree[two] else None

    def _link(self) -> Op | None:
        path = self._pick([path for kind in ("journal", "work") for path in self._paths(kind)])
        if path is None or len(self.tree) >= NAMES_MAX:
            return None
        return Op("link", path, to=self._new_path(f"l{{}}{os.path.splitext(path)[1]}"))

    def _unlink(self) -> Op | None:
        if len(self.tree) < NAMES_MAX // 2:
            return None
        return Op("unlink", self.random.choice([path for path, node in self.tree.items() if node[0] != "dir"]))

    def _symlink(self) -> Op | None:
        if len(self.tree) >= NAMES_MAX:
            return None
        return Op("symlink", self._new_path("y{}"), to=f"target {self._word()}")

    # --- playing

    def file(self, path: str) -> File:
        return self.files[int(self.tree[path][1])]

    def _names_changed(self, tree: Tree, *paths: str) -> None:
        """The tree is another one since this operation; `paths` are those whose entries came, went or changed."""
        for path in paths:
            self.entries_changed[os.path.dirname(path)] = self.at
        self.tree = tree
        self.trees.append((self.at, tree))

    def _play_create(self, op: Op) -> None:
        number = next(self._ids)
        self.files[number] = File(op.to, [Version(self.at, self.at, op.data, True)])
        self.moved[number] = self.at
        self._names_changed({**self.tree, op.path: ("file", number)}, op.path)

    def _play_append(self, op: Op) -> None:
        file = self.file(op.path)
        file.versions.append(Version(self.at, self.at, file.content + op.data, True))

    def _play_rewrite(self, op: Op) -> None:
        file = self.file(op.path)
        file.versions.append(Version(self.at, self.at, op.data, file.kind == "journal"))

    def _play_begin(self, op: Op) -> None:
        file = self.file(op.path)
        cuts = sorted(self.random.randrange(len(op.data) + 1) for _ in range(3))
        pieces = [op.data[a:b] for a, b in zip([0, *cuts], [*cuts, len(op.data)], strict=True)]
        file.rewriting = [piece for piece in pieces if piece]
        file.versions.append(Version(self.at, 1 << 60, op.data, False))

    def _play_piece(self, op: Op) -> None:
        pass  # it was taken from what is left when it was chosen

    def _play_finish(self, op: Op) -> None:
        file = self.files[op.number]
        file.rewriting = None
        file.versions[-1].done = self.at

    def _play_slot(self, op: Op) -> None:
        file = self.file(op.path)
        start = op.number * SLOT_BYTES
        content = file.content[:start] + op.data + file.content[start + len(op.data) :]
        file.versions.append(Version(self.at, self.at, content, True))

    def _play_fsync(self, op: Op) -> None:
        number = int(self.tree[op.path][1])
        file = self.files[number]
        file.synced.append(Synced(self.at, len(file.versions) - 1, self._names_since(number)))

    def _play_fsyncdir(self, op: Op) -> None:
        since = max([self.entries_changed.get(op.path, -1), *(self.moved[each] for each in self._above(op.path))])
        self.directory_synced.append(Synced(self.at, 0, since))

    def _names_since(self, number: int) -> int:
        paths = [path for path, node in self.tree.items() if node == ("file", number)]
        return max([self.moved[number], *(self.moved[each] for path in paths for each in self._above(path))])

    def _above(self, path: str) -> list[int]:
        """The directories on a path, itself included if it is one."""
        steps = path.split("/")
        nodes = [self.tree.get("/".join(steps[: n + 1])) for n in range(len(steps))]
        return [int(node[1]) for node in nodes if node is not None and node[0] == "dir"]

    def _play_mkdir(self, op: Op) -> None:
        number = next(self._ids)
        self.moved[number] = self.at
        self.entries_changed[op.path] = self.at
        self._names_changed({**self.tree, op.path: ("dir", number)}, op.path)

    def _play_symlink(self, op: Op) -> None:
        self._names_changed({**self.tree, op.path: ("link", op.to)}, op.path)

    def _play_unlink(self, op: Op) -> None:
        self._gone(op.path)

    def _play_rmdir(self, op: Op) -> None:
        self._gone(op.path)

    def _gone(self, path: str) -> None:
        self._moved_now(path)
        self._names_changed({each: node for each, node in self.tree.items() if each != path}, path)

    def _moved_now(self, path: str) -> None:
        if self.tree[path][0] != "link":
            self.moved[int(self.tree[path][1])] = self.at

    def _play_link(self, op: Op) -> None:
        self._moved_now(op.path)
        self._names_changed({**self.tree, op.to: self.tree[op.path]}, op.to)

    def _play_rename(self, op: Op) -> None:
        self._moved_now(op.path)
        if op.to in self.tree:
            self._moved_now(op.to)
            file = self.file(op.path)
            file.replaced_at.append(Synced(self.at, len(file.versions) - 1, self.at))
        tree = {}
        for path, node in self.tree.items():
            if path == op.path or path.startswith(f"{op.path}/"):
                tree[op.to + path[len(op.path) :]] = node
            elif path != op.to:
                tree[path] = node
        for directory in list(self.entries_changed):
            if directory == op.path or directory.startswith(f"{op.path}/"):
                self.entries_changed[op.to + directory[len(op.path) :]] = self.entries_changed.pop(directory)
        self._names_changed(tree, op.path, op.to)

    def _play_exchange(self, op: Op) -> None:
        for path in (op.path, op.to):
            self._moved_now(path)
            file = self.file(path)
            file.replaced_at.append(Synced(self.at, len(file.versions) - 1, self.at))
        self._names_changed({**self.tree, op.path: self.tree[op.to], op.to: self.tree[op.path]}, op.path, op.to)


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
