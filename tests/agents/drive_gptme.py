"""Runs one version of gptme, unmodified, against `fake_llm`: three sessions of eight messages.

The first is new, the second and the third resume it. The first only appends; the
second also undoes and edits, the third undoes twice and forks, so that
``branches/*.jsonl`` and a second conversation come to be. gptme is told where to
live by its environment alone, all of it below one directory; of the machine it sees
the programs in /usr/bin and the server on loopback.

By hand: ``PYTHONPATH=tests python -m agents.drive_gptme <environment> <directory> [<witness report>]``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from agents import fake_llm

HERE = Path(__file__).resolve().parent
VERSIONS = ("0.33.0", "0.35.1")
CONVERSATION = "conv"
FORK = "conv-fork"
SESSION_SECONDS_MAX = 120
CLOCK_START = 1_767_225_600  # 2026-01-01; a session is an hour later than the one before

SESSIONS: tuple[tuple[str, ...], ...] = (
    (
        "one: what is an extent?",
        "two: say it in a shell [echo]",
        "three: and at length [long]",
        "four: with «unicode» – 日本語, \\ backslashes and\nlines",
        "five: write it down [save]",
        "six: thanks",
        "seven: once more [echo]",
        "eight: that will do",
    ),
    (
        "nine: we are back",
        "ten: a reply to be undone [long]",
        "/undo",
        "eleven: better",
        "twelve: the ORIGINAL wording",
        "thirteen: note this [save]",
        "/edit",
        "fourteen: after the edit",
        "fifteen: again at length [long]",
        "sixteen: bye",
    ),
    (
        "seventeen: a third time",
        "eighteen: run it [echo]",
        "/undo 3",
        "nineteen: after a deeper undo",
        "twenty: and go on [long]",
        "/undo",
        "twenty-one: nearly there",
        "twenty-two: last one here",
        f"/fork {FORK}",
        "twenty-three: in the fork [save]",
        "twenty-four: the end",
    ),
)
MESSAGES_PER_SESSION = 8
EDIT = "s/ORIGINAL/edited/g"

# Left out of gptme's hooks: workspace_agents, which looks for other agents among all processes of the machine.
HOOKS = (
    "cwd_changed,cwd_awareness,markdown_validation,time_awareness,token_awareness,active_context,cost_awareness,"
    "cache_awareness"
)


def environment_of(version: str) -> Path:
    """Where scripts/setup-agents puts a version."""
    return HERE.parents[1] / ".venv-agents" / f"gptme-{version}"


@dataclass(frozen=True, slots=True)
class Gptme:
    """One installed version, told to live below `root`. `scratch` is for what must not lie on the same filesystem."""

    environment: Path
    root: Path
    scratch: Path
    server_url: str
    witness: Path | None = None

    def prepare(self) -> None:
        for name in ("home", "config", "data", "state", "cache", "tmp", "work"):
            (self.root / name).mkdir(parents=True)
        (self.root / "work" / "README.md").write_text("# A workspace\n\nNothing here yet.\n")
        self.scratch.mkdir(parents=True, exist_ok=True)
        editor = self.scratch / "editor"
        editor.write_text(f'#!/bin/sh\nexec sed -i "{EDIT}" "$1"\n')
        editor.chmod(0o755)

    @property
    def logs(self) -> Path:
        return self.root / "data" / "gptme" / "logs"

    def journals(self) -> dict[str, bytes]:
        """Every journal below the root, by its path from there."""
        paths = sorted(self.root.rglob("*.jsonl"))
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths if path.is_file()}

    def run(self, session: int) -> str:
        """One session, to its end; returns what gptme printed. No process of it is left."""
        mark = uuid.uuid4().hex
        prompts = [part for prompt in SESSIONS[session] for part in ("-", prompt)][1:]
        which = ["--resume"] if session == 2 else ["--name", CONVERSATION]
        command = [str(self.environment / "bin" / "python"), "-m", "gptme", *which, "--non-interactive"]
        command += ["--model", f"local/{fake_llm.MODEL}", "--tools", "shell,save", "--tool-format", "markdown"]
        command += ["--workspace", str(self.root / "work"), *prompts]
        process = subprocess.Popen(
            command,
            env=self._variables(session) | {"AGENT_MARK": mark},
            cwd=self.root / "work",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SESSION_SECONDS_MAX)
        finally:
            left = end_marked(mark)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if process.returncode or left:
            raise RuntimeError(f"gptme: status {process.returncode}, left behind {left}\n{output[-4000:]}")
        return output

    def _variables(self, session: int) -> dict[str, str]:
        root = self.root
        variables = {
            "PATH": f"{self.environment / 'bin'}:/usr/bin:/bin",
            "HOME": str(root / "home"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "TMPDIR": str(root / "tmp"),
            "EDITOR": str(self.scratch / "editor"),
            "TZ": "UTC",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(HERE / "determinism"),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "AGENT_CLOCK": str(CLOCK_START + 3600 * session),
            "OPENAI_BASE_URL": f"{self.server_url}/v1",
            "OPENAI_API_KEY": "none",
            "HOOK_ALLOWLIST": HOOKS,
            "GPTME_TIKTOKEN_TIMEOUT": "0",  # else it downloads a vocabulary
            "GPTME_NO_LOCAL_DISCOVERY": "1",  # else it looks for other servers on loopback
            "GPTME_TELEMETRY_ENABLED": "false",
            "OTEL_SDK_DISABLED": "true",
        }
        if self.witness is not None:
            variables["AGENT_WITNESS"] = str(self.witness)
        return variables


def marked(mark: str) -> list[int]:
    """The processes that inherited a mark in their environment, however they detached themselves."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"AGENT_MARK={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def end_marked(mark: str, *, grace_seconds: float = 2.0) -> list[int]:
    """End every marked process; those that had not ended by themselves within the grace are returned."""
    deadline = time.monotonic() + grace_seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)  # sleeps: another program ends when it ends
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return left


def main() -> None:
    environment, root = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    witness = Path(sys.argv[3]).absolute() if len(sys.argv) > 3 else None
    with fake_llm.serving() as server:
        gptme = Gptme(environment, root, root.parent / f"{root.name}.scratch", server.url, witness)
        gptme.prepare()
        for session in range(len(SESSIONS)):
            begun = time.monotonic()
            print(gptme.run(session))
            print(f"-- session {session + 1}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
        for path, content in gptme.journals().items():
            print(f"{len(content):9} {path}", file=sys.stderr)
        print(f"{len(server.requests)} requests, errors: {server.errors}", file=sys.stderr)


if __name__ == "__main__":
    main()
