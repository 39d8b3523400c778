"""Every promise of docs/semantics.md names a test, and that test exists."""

import pathlib
import re

TESTS = pathlib.Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "semantics.md"


def test_every_promise_names_a_test_that_exists() -> None:
    text = DOCUMENT.read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    defined = {
        name
        for path in TESTS.glob("**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named
    assert named <= defined, sorted(named - defined)


def test_no_promise_is_without_a_test() -> None:
    promises = DOCUMENT.read_text().split("## What is different")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 30
    assert not [row for row in rows if not re.search(r"\| `test_\w+` \|$", row)]
