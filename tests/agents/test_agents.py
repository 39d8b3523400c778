"""A real agent leaves the same journals on a mount as on an ordinary filesystem, and the mount stores what it meant.

gptme 0.33.0 rewrites a journal whole for each message, through O_TRUNC; 0.35.1 appends, and replaces by rename when it
undoes or edits. Each is run twice at the same time, with the same prompts: once below `tmp_path`, once on the mount.

Nothing is masked in the journals but what names the place: the path of the run's directory, and digests of texts that
hold it. The two directories have paths of the same length, since gptme counts tokens by length. Everything else is made
equal from outside: see determinism/sitecustomize.py.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agents import fake_llm
from agents.drive_gptme import CONVERSATION, FORK, SESSIONS, VERSIONS, Gptme, environment_of
from mounting import Mount, wait_until

from deltapool.fs.fold import common_prefix

pytestmark = [pytest.mark.agents, pytest.mark.slow]

LOGS = "data/gptme/logs"
DIGEST = re.compile(
    rb'("input_log_digest": ")[0-9a-f]{64}"'
)  # 0.35.1: of the messages before, which name the workspace
BRANCHES = ("main-edit-0", "main-undo-0", "main-undo-1", "main-undo-2")


@pytest.fixture
def server() -> Iterator[fake_llm.Server]:
    with fake_llm.serving() as serving:
        yield serving


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not environment_of(name).exists():
        pytest.fail(f"gptme {name} is not installed: run scripts/setup-agents")
    return name


@dataclass(frozen=True, slots=True)
class Count:
    """What a filesystem, or the witness, says of all journals together."""

    changed: int
    rewrites_folded: int


def roots(plain: Path, mounted: Path) -> tuple[Path, Path]:
    """A directory in each, with paths of the same length."""
    missing = len(str(mounted)) - len(str(plain))
    return plain / ("r" * (8 + max(0, missing))), mounted / ("r" * (8 + max(0, -missing)))


def comparable(gptme: Gptme) -> dict[str, bytes]:
    """The journals of a run, with what names the place masked."""
    here = str(gptme.root).encode()
    return {
        name: DIGEST.sub(rb'\1<digest>"', content.replace(here, b"<root>"))
        for name, content in gptme.journals().items()
    }


def difference(actual: bytes, expected: bytes) -> str:
    """Where two journals first differ, and how; nothing if they don't."""
    if actual == expected:
        return ""
    at = common_prefix(actual, expected)
    around = slice(max(0, at - 40), at + 40)
    return f"of {len(actual)} and {len(expected)} bytes, byte {at}: {actual[around]!r} for {expected[around]!r}"


def drive(gptme: Gptme, after_first: Callable[[], None]) -> None:
    gptme.prepare()
    for session in range(len(SESSIONS)):
        gptme.run(session)
        if session == 0:
            after_first()


def witnessed(report: Path) -> int:
    """The bytes that really changed in all journals, generation by generation."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in report.read_text().splitlines()]
    return sum(line["changed"] for line in lines)


def counted(mount: Mount) -> Count:
    """What the mount says. A file's last close reaches it after the program has gone on: wait until it has settled."""
    seen: list[Count] = []

    def settled() -> bool:
        journals = mount.status()["journals"]
        seen.append(Count(journals["bytes_changed"], journals["rewrites_folded"]))
        return len(seen) >= 2 and seen[-1] == seen[-2]

    wait_until(settled, "a status that does not change")
    return seen[-1]


def sizes(gptme: Gptme) -> int:
    return sum(map(len, gptme.journals().values()))


@pytest.mark.timeout(900)
def test_journals_are_those_of_an_ordinary_filesystem(
    version: str, mount: Mount, server: fake_llm.Server, tmp_path: Path
) -> None:
    plain_root, mounted_root = roots(tmp_path / "plain", mount.path)
    report = tmp_path / "witness"
    environment = environment_of(version)
    plain = Gptme(environment, plain_root, tmp_path / "scratch-plain", server.url, report)
    mounted = Gptme(environment, mounted_root, tmp_path / "scratch-mounted", server.url)
    first: dict[str, Any] = {}
    before = counted(mount)

    def after_first_plain() -> None:
        first["witnessed"] = witnessed(report)

    def after_first_mounted() -> None:
        first["counted"], first["sizes"] = counted(mount), sizes(mounted)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(drive, plain, after_first_plain), pool.submit(drive, mounted, after_first_mounted)]
        for run in runs:
            run.result()

    expected, actual = comparable(plain), comparable(mounted)
    assert sorted(actual) == sorted(expected)
    assert {name: at for name in expected if (at := difference(actual[name], expected[name]))} == {}
    assert_the_run_was_not_empty(expected, server)

    after, total = counted(mount), witnessed(report)
    mount.remount()
    assert comparable(mounted) == actual

    changed_first = first["counted"].changed - before.changed
    changed = after.changed - before.changed
    # The first session only appends. Whatever it rewrote to do so, what changed is what is there now.
    assert first["witnessed"] == first["sizes"]
    assert changed_first == first["sizes"]
    # Later an undo or an edit replaces a suffix: what it took away was once written, so the sum of what changed exceeds
    # what is left. It is at most what the witness saw, who compares prefixes only, and at least every byte there is.
    assert sizes(mounted) <= changed <= total
    if version == "0.33.0":  # writes in place only, so nothing but prefixes is kept: byte for byte what the witness saw
        assert changed == total
        assert first["counted"].rewrites_folded > before.rewrites_folded
        assert after.rewrites_folded > first["counted"].rewrites_folded


def assert_the_run_was_not_empty(journals: dict[str, bytes], server: fake_llm.Server) -> None:
    """gptme did what it was asked to: every message was sent, branches were made and a fork."""
    assert server.errors == []
    for name in (CONVERSATION, FORK):
        assert f"{LOGS}/{name}/conversation.jsonl" in journals
        assert f"{LOGS}/{name}/events.jsonl" in journals
        for branch in BRANCHES:
            assert f"{LOGS}/{name}/branches/{branch}.jsonl" in journals
    messages = [prompt for session in SESSIONS for prompt in session if not prompt.startswith("/")]
    assert len(messages) == 24
    for message in messages:
        # One run each. After an undo gptme may join two messages into one.
        assert sum(message in prompt for prompt in server.prompts) >= 2, message
    edited = journals[f"{LOGS}/{CONVERSATION}/conversation.jsonl"]
    assert b"the edited wording" in edited
    assert b"the ORIGINAL wording" not in edited
    assert b"the ORIGINAL wording" in journals[f"{LOGS}/{CONVERSATION}/branches/main-edit-0.jsonl"]
    assert b"in the fork" in journals[f"{LOGS}/{FORK}/conversation.jsonl"]
