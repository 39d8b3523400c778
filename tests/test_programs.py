"""Programs that people run in a workspace, unmodified: git, SQLite, pip, editors, tar, cp, rsync.

What they leave is checked by themselves, and compared with what they leave on a plain folder.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import signal
import sqlite3
import stat
import sys
import zipfile
from collections.abc import Callable

import pytest
from mounting import Mount, run, wait_until
from processes import Child, Counter, together

PYTHON = sys.executable


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


# --- git


def git(place: pathlib.Path, *words: str) -> str:
    settings = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return run(["git", *settings, *words], cwd=place, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null")


@needs("git")
def test_git_finds_everything_as_it_left_it(shared: Mount, folder: pathlib.Path) -> None:
    """Commits, branches, a local clone by hard links, a merge, gc, fsck; and an index that fits after a remount."""
    repository, clone = folder / "repository", folder / "clone"
    repository.mkdir()
    git(repository, "init", "-q")
    for commit in range(4):
        for number in range(30):
            path = repository / f"d{number % 3}" / f"file{number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"commit {commit} file {number}\n" * (1 + number * commit * 5))
        (repository / "session.jsonl").write_text("".join(f'{{"commit": {each}}}\n' for each in range(commit)))
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", f"commit {commit}")
    git(folder, "clone", "-q", "--local", "repository", "clone")
    linked = [path for path in (clone / ".git" / "objects").rglob("*") if path.is_file() and path.stat().st_nlink == 2]
    assert len(linked) > 100
    git(clone, "switch", "-qc", "branch.jsonl")  # the name of a branch is no journal's
    (clone / "d0" / "new.txt").write_text("new\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "in the clone")
    git(repository, "pull", "-q", "--no-rebase", str(clone), "branch.jsonl")
    git(repository, "worktree", "add", "-q", str(folder / "tree"), "HEAD~1")
    git(repository, "gc", "-q", "--aggressive", "--prune=now")
    assert any((repository / ".git" / "objects" / "pack").glob("*.pack"))

    def check() -> None:
        for place in (repository, clone, folder / "tree"):
            git(place, "fsck", "--full", "--strict")
            assert git(place, "status", "--porcelain") == ""
        assert git(repository, "rev-list", "--count", "HEAD") == "5\n"
        assert git(repository, "log", "-p", "--all").count("\n") > 1000

    check()
    shared.remount()
    for place in (repository, clone):
        git(place, "diff-files", "--quiet")  # by inode, size and times alone: nothing is read
    check()


# --- SQLite


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_sqlite_survives_a_killed_process_beside_another(folder: pathlib.Path, mode: str) -> None:
    """Two processes insert; one is killed within a transaction, which is undone; the other one goes on."""
    path, done = folder / "x.db", [Counter(), Counter()]

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        assert connection.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode,)
        return connection

    def insert(writer: int, count: int) -> None:
        connection = connect()
        for number in range(count):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(writer, number, "x" * 500)] * 10)
            connection.execute("COMMIT")
            done[writer].add()
        connection.close()

    def die() -> None:
        insert(1, 5)
        connection = connect()
        connection.execute("PRAGMA cache_size=5")  # so that pages are written before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, 99, "x" * 3000)] * 500)
        os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.closing(connect()) as connection:
        connection.execute("CREATE TABLE t(writer, number, fill)")
    with Child(lambda: insert(0, 20)) as good, Child(die) as bad:
        assert os.WTERMSIG(bad.reap()) == signal.SIGKILL
        good.wait()
    with contextlib.closing(connect()) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT writer, count(*) FROM t GROUP BY 1").fetchall() == [(0, 200), (1, 50)]
    assert [counter.value for counter in done] == [20, 5]


# --- pip


def wheel(place: pathlib.Path) -> pathlib.Path:
    """A package of 60 modules with a command, built by hand."""
    path = place / "sample_package-1.0-py3-none-any.whl"
    files = {f"sample_package/m{number}.py": f"VALUE = {number}\n" * (number + 1) for number in range(60)}
    files["sample_package/__init__.py"] = ""
    files["sample_package/main.py"] = (
        "import importlib, pathlib\n"
        "def main():\n"
        "    print(sum(importlib.import_module(f'sample_package.m{n}').VALUE for n in range(60)))\n"
    )
    info = "sample_package-1.0.dist-info"
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: sample-package\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = "[console_scripts]\nsample = sample_package.main:main\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_pip_installs_into_an_environment_on_the_mount(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run([PYTHON, "-m", "venv", "--without-pip", folder / "venv"])
    python, package = folder / "venv" / "bin" / "python", wheel(tmp_path)

    def pip(*words: str | pathlib.Path) -> str:
        command = [PYTHON, "-m", "pip", "--python", python, *words]
        return run(command, PIP_CACHE_DIR=str(folder / ".cache" / "pip"), PIP_DISABLE_PIP_VERSION_CHECK="1")

    pip("install", "--no-index", "--no-deps", "-q", package)
    assert run([folder / "venv" / "bin" / "sample"]) == f"{sum(range(60))}\n"
    assert run([python, "-c", "import sys; print(sys.prefix)"]).strip() == str(folder / "venv")
    pip("install", "--no-index", "--no-deps", "-q", "--force-reinstall", package)
    assert run([folder / "venv" / "bin" / "sample"]) == f"{sum(range(60))}\n"
    assert "sample-package 1.0" in " ".join(pip("list").split())
    pip("uninstall", "-q", "-y", "sample-package")
    assert not any((folder / "venv").rglob("*sample*"))


# --- editors


def replace_by_rename(path: pathlib.Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.write(fd, b"new content\n")
    os.fchmod(fd, stat.S_IMODE(path.stat().st_mode))
    os.fsync(fd)
    os.close(fd)
    os.rename(temporary, path)


def keep_a_backup(path: pathlib.Path) -> None:
    """vim with backupcopy=no: the old file is moved away, a new one written, the old one removed."""
    mode, backup = path.stat().st_mode, path.with_name(f"{path.name}~")
    os.close(os.open(path.with_name("4913"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode & 0o777))
    os.unlink(path.with_name("4913"))
    os.rename(path, backup)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode & 0o777)
    os.write(fd, b"new content\n")
    os.fsync(fd)
    os.close(fd)
    path.chmod(mode & 0o777)
    backup.unlink()


def overwrite_then_cut(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"new content\n")
    os.ftruncate(fd, 12)
    os.close(fd)


def write_anew(path: pathlib.Path) -> None:
    path.write_bytes(b"new content\n")


def by_sed(path: pathlib.Path) -> None:
    run(["sed", "-i", "-e", "1s/.*/new content/", "-e", "2,$d", path])


def by_vim(path: pathlib.Path) -> None:
    run(["vim", "-Nu", "NONE", "-i", "NONE", "-es", "-c", "1s/.*/new content/", "-c", "2,$d", "-c", "wq", path])


@pytest.mark.parametrize("name", ["note.txt", "session.jsonl"])
@pytest.mark.parametrize(
    "save",
    [
        *(replace_by_rename, keep_a_backup, overwrite_then_cut, write_anew, by_sed),
        pytest.param(by_vim, marks=needs("vim")),
    ],
)
def test_an_editor_saves_as_on_ext4(
    folder: pathlib.Path, tmp_path: pathlib.Path, save: Callable[[pathlib.Path], None], name: str
) -> None:
    """Content, mode and other names of the file afterwards, and whether it is still the same file."""

    def play(place: pathlib.Path) -> tuple[list[str], bytes, bytes, int, bool]:
        path, other = place / name, place / "other name"
        path.write_bytes(b"old content\n" * 300)
        path.chmod(0o640)
        os.link(path, other)
        inode = path.stat().st_ino
        save(path)
        return (
            sorted(os.listdir(place)),
            path.read_bytes(),
            other.read_bytes(),
            path.stat().st_mode,
            (path.stat().st_ino == inode),
        )

    result = play(folder)
    assert result[1] == b"new content\n"
    assert result == play(tmp_path)


# --- copies


def sample(place: pathlib.Path) -> pathlib.Path:
    """A tree with everything that a copy must keep."""
    place.mkdir()
    for number in range(40):
        path = place / f"d{number % 4}" / f"file{number}{'.jsonl' if number % 5 == 0 else ''}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(hashlib.sha256(b"%d" % number).digest() * number * 100)
        path.chmod(0o600 + number % 2 * 0o55)
        os.setxattr(path, "user.number", b"%d" % number)
        os.utime(path, ns=(10**18 + number, 10**18 + number * 7))
    (place / "link").symlink_to("d0/file0.jsonl")
    os.link(place / "d1" / "file1", place / "hard link")
    os.mkfifo(place / "fifo")
    (place / "empty").mkdir(mode=0o1777)
    with open(place / "sparse", "wb") as file:
        file.truncate(5_000_000)
    (place / "näme\udcff").write_bytes(b"x")
    os.utime(place, ns=(10**18, 10**18))
    return place


def described(place: pathlib.Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in place.rglob("*"):
        seen = path.lstat()
        name = str(path.relative_to(place))
        content: object = None
        if stat.S_ISREG(seen.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            attributes = {each: os.getxattr(path, each) for each in os.listxattr(path)}
            found[name] = (seen.st_mode, seen.st_mtime_ns, seen.st_nlink, seen.st_size, content, attributes)
        elif stat.S_ISLNK(seen.st_mode):
            found[name] = os.readlink(path)
        else:
            found[name] = (seen.st_mode, seen.st_nlink if path.is_dir() else 1)
    return found


def by_cp(source: pathlib.Path, target: pathlib.Path) -> None:
    run(["cp", "-a", source, target])


def by_tar(source: pathlib.Path, target: pathlib.Path) -> None:
    target.mkdir()
    options = "--format=posix --xattrs --xattrs-include=user.*"
    run(["sh", "-c", f'tar -C "$0" {options} -cf - . | tar -C "$1" {options} -xpf -', source, target])


def by_rsync(source: pathlib.Path, target: pathlib.Path) -> None:
    run(["rsync", "-aHXS", f"{source}/", f"{target}/"])
    assert run(["rsync", "-aHXSni", f"{source}/", f"{target}/"]) == ""  # nothing is left to do


def by_shutil(source: pathlib.Path, target: pathlib.Path) -> None:
    """shutil's way: copy_file_range or sendfile, then the attributes. It knows neither hard links nor fifos."""
    for special in ("hard link", "fifo"):
        (source / special).unlink()
    shutil.copytree(source, target, symlinks=True)


@pytest.mark.parametrize("copy", [by_cp, by_tar, pytest.param(by_rsync, marks=needs("rsync")), by_shutil])
def test_a_copy_onto_the_mount_and_back_is_the_same(
    folder: pathlib.Path, tmp_path: pathlib.Path, copy: Callable[[pathlib.Path, pathlib.Path], None]
) -> None:
    source = sample(tmp_path / "source")
    copy(source, folder / "copy")
    original = described(source)
    assert described(folder / "copy") == original
    if copy is not by_shutil:
        copy(folder / "copy", tmp_path / "back")
        assert described(tmp_path / "back") == original


def test_a_program_follows_a_journal_that_another_writes(folder: pathlib.Path) -> None:
    """tail -f goes by inotify and size."""
    path = folder / "session.jsonl"
    path.write_bytes(b"first\n")

    def follow() -> str:
        return run(["sh", "-c", 'timeout 60 tail -n +1 -f "$0" | head -n 3', path])

    def write() -> None:
        with open(path, "ab", buffering=0) as file:
            file.write(b"second\n")
            wait_until(lambda: readers(path) > 0, "the reader")
            file.write(b"third\n")
            while readers(path):  # tail ends with the first write after head has ended
                file.write(b"more\n")

    assert together(follow, write)[0] == "first\nsecond\nthird\n"


def readers(path: pathlib.Path) -> int:
    """How many processes called tail have the file open."""
    count = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text() == "tail\n":
                count += any(os.readlink(fd) == str(path) for fd in (process / "fd").iterdir())
    return count


@needs("npm")
def test_npm_installs_a_package_with_its_cache_on_the_mount(folder: pathlib.Path) -> None:
    package, project = folder / "package", folder / "project"
    package.mkdir()
    project.mkdir()
    (package / "package.json").write_text('{"name": "sample", "version": "1.0.0", "bin": {"sample": "main.js"}}')
    (package / "main.js").write_text("#!/usr/bin/env node\nconsole.log('sample', require('./m19.js'))\n")
    for number in range(20):
        (package / f"m{number}.js").write_text(f"module.exports = {number}\n" * (number + 1))
    (project / "package.json").write_text('{"name": "project", "version": "1.0.0"}')

    def npm(place: pathlib.Path, *words: str) -> str:
        quiet = ["--offline", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        return run(["npm", *words, *quiet], cwd=place, npm_config_cache=str(folder / ".npm"), HOME=str(folder))

    npm(package, "pack")
    npm(project, "install", str(package / "sample-1.0.0.tgz"))
    assert run([project / "node_modules" / ".bin" / "sample"]) == "sample 19\n"
    npm(project, "ci")  # from its cache
    assert run([project / "node_modules" / ".bin" / "sample"]) == "sample 19\n"
    cached = [path for path in (folder / ".npm" / "_cacache").rglob("*") if path.is_file()]
    assert {os.getxattr(path, "user.deltapool.class") for path in cached} == {b"cache"}
