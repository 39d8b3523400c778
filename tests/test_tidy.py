"""The repository's own rules, held by a test: sizes, docstrings, packaging, words, documents.

What ruff, mypy and import-linter can say, they say (scripts/check). Here is what they can't.
"""

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"deltapool.fs": ROOT / "fs", "deltapool.cas": ROOT / "cas"}

MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70

DOCUMENTS = [
    "CHANGELOG.md",
    "README.md",
    "docs/concurrency.md",
    "docs/format.md",
    "docs/operations.md",
    "docs/semantics.md",
]

# Written apart, so that this file does not hold them.
BANNED_WORDS = ["NotImplemented" + "Error", "TO" + "DO", "FIX" + "ME"]

# A test sleeps only where nothing can be awaited, and says why: time.sleep(1)  # sleeps: the mtime must differ
SLEEP_REASON = re.compile(r"# sleeps: \S")


def python_files() -> list[Path]:
    """Every module of ours, scripts without a suffix included."""
    modules = [path for top in ("fs", "cas", "tests", "scripts") for path in (ROOT / top).rglob("*.py")]
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    return sorted(modules + [path for path in scripts if "python" in first_line(path)])


def text_files() -> list[Path]:
    """Everything in which a banned word would be a promise left open."""
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    return sorted({*python_files(), *scripts, ROOT / ".ci" / "run"})


def first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline().decode("utf-8", "replace")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[Any]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, kinds))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules_of_tests() -> list[Path]:
    return [path for path in python_files() if path.is_relative_to(ROOT / "tests")]


each_module = pytest.mark.parametrize("path", python_files(), ids=name)
each_test_module = pytest.mark.parametrize("path", modules_of_tests(), ids=name)


@each_module
def test_a_module_has_one_screenful_of_purpose(path: Path) -> None:
    lines = len(path.read_bytes().splitlines())
    assert lines <= MODULE_LINES_MAX, f"{name(path)} has {lines} lines: divide it"


@each_module
def test_a_function_can_be_read_at_once(path: Path) -> None:
    for function in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef):
        lines = function.end_lineno - function.lineno + 1
        assert lines <= FUNCTION_LINES_MAX, f"{name(path)}: {function.name} has {lines} lines: divide it"


@each_module
def test_a_module_opens_with_its_theory(path: Path) -> None:
    assert (ast.get_docstring(tree(path)) or "").strip(), f"{name(path)} has no docstring"


@each_module
def test_our_packages_are_called_by_their_full_name(path: Path) -> None:
    for node in nodes(path, ast.Import, ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            top = module.partition(".")[0]
            assert top not in {"fs", "cas"}, f"{name(path)}, line {node.lineno}: say deltapool.{module}"


@pytest.mark.parametrize("path", text_files(), ids=name)
def test_nothing_is_left_for_later(path: Path) -> None:
    words = re.findall(r"\w+", path.read_text(encoding="utf-8"))
    for word in BANNED_WORDS:
        assert word not in words, f"{name(path)} says {word}"


@each_test_module
def test_a_test_that_sleeps_says_why(path: Path) -> None:
    comments = comments_by_line(path)
    for node in nodes(path, ast.Attribute, ast.ImportFrom):
        if isinstance(node, ast.ImportFrom):
            sleeps = node.module == "time" and any(alias.name == "sleep" for alias in node.names)
        else:
            sleeps = node.attr == "sleep" and isinstance(node.value, ast.Name) and node.value.id == "time"
        if sleeps:
            said = SLEEP_REASON.search(comments.get(node.lineno, ""))
            assert said, f"{name(path)}, line {node.lineno}: wait for what is awaited, or say '# sleeps: why'"


@each_test_module
def test_a_test_takes_its_chances_from_a_seed(path: Path) -> None:
    for node in nodes(path, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr in {"Random", "seed"}, f"{name(path)}, line {node.lineno}: take a seeded random.Random"


def comments_by_line(path: Path) -> dict[int, str]:
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def test_pyproject_lists_the_packages_of_the_tree() -> None:
    found = {
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in PACKAGES.items()
        for init in folder.rglob("__init__.py")
    }
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == found


@pytest.mark.parametrize("folder", PACKAGES.values(), ids=name)
def test_every_module_is_in_a_package(folder: Path) -> None:
    for module in folder.rglob("*.py"):
        assert (module.parent / "__init__.py").exists(), f"{name(module.parent)} has no __init__.py"
    assert (folder / "py.typed").exists()


def test_every_pure_core_exists() -> None:
    """A wildcard may match nothing: a core that was renamed would slip out of its contract unseen."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["name"].startswith("Pure cores")]
    for pattern in pure["source_modules"]:
        stem = pattern.removeprefix("deltapool.*.")
        assert any((folder / f"{stem}.py").exists() for folder in PACKAGES.values()), f"no module matches {pattern}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_document_exists(document: str) -> None:
    assert (ROOT / document).read_text(encoding="utf-8").strip()


def test_decisions_are_numbered_without_gap() -> None:
    records = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [record[:5] for record in records] == [f"{number:04d}-" for number in range(1, len(records) + 1)]
    for record in records:
        text = (ROOT / "docs" / "decisions" / record).read_text(encoding="utf-8")
        assert text.startswith(f"# {int(record[:4])}. "), f"{record} does not open with its number and title"
