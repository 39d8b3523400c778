"""When what was written becomes the file that a crash leaves: rewrites, and files that somebody took away.

The settler's own rhythm is switched off here, so that only what is under test makes it act.
"""

import errno
import pathlib
from collections.abc import Iterator

import pytest
from faults import FaultyMount
from mounting import wait_until
from processes import errno_of

SELDOM = "[limits]\nsettle_seconds = 600\nrewrite_idle_seconds = 600\nrewrite_seconds = 600\n"
OLD, NEW = b"old " * 5000, b"new " * 6000


@pytest.fixture
def mount(tmp_path: pathlib.Path) -> Iterator[FaultyMount]:
    made = FaultyMount(tmp_path / "mount", tmp_path / "state", SELDOM)
    try:
        made.start()
        yield made
    finally:
        made.clear()


def live_file(mount: FaultyMount, path: pathlib.Path, suffix: str = "") -> pathlib.Path:
    number = path.stat().st_ino
    return mount.state / "live" / f"{number % 256:02x}" / f"{number}{suffix}"


def replaced(mount: FaultyMount, path: pathlib.Path) -> bool:
    return not live_file(mount, path, ".new").exists()


def test_a_rewritten_file_replaces_the_old_one_as_soon_as_it_is_closed(mount: FaultyMount) -> None:
    path = mount.path / "file"
    path.write_bytes(OLD)
    with open(path, "wb", buffering=0) as file:
        file.write(NEW)
        assert not replaced(mount, path)
    wait_until(lambda: replaced(mount, path), "the new file in the old one's place")
    mount.crash()
    assert path.read_bytes() == NEW


def test_a_rewrite_that_goes_on_is_not_hurried_by_those_that_end(mount: FaultyMount) -> None:
    slow, quick = mount.path / "slow", mount.path / "quick"
    slow.write_bytes(OLD)
    quick.write_bytes(OLD)
    with open(slow, "wb", buffering=0) as file:
        file.write(NEW[:100])
        for _ in range(10):
            quick.write_bytes(NEW)
            wait_until(lambda: replaced(mount, quick), "the end of a quick one")
        assert not replaced(mount, slow)
        mount.kill()
    mount.start()
    assert slow.read_bytes() == OLD
    assert quick.read_bytes() == NEW


@pytest.mark.parametrize(
    ("limit", "pauses"), [("rewrite_idle_seconds", True), ("rewrite_seconds", False)], ids=["paused", "never paused"]
)
def test_a_rewrite_that_takes_too_long_replaces_the_old_file_while_it_goes_on(
    mount: FaultyMount, limit: str, pauses: bool
) -> None:
    """A log that was truncated under its writer must not come back with its old content much later."""
    mount.stop()
    mount.config = "[limits]\nsettle_seconds = 0.05\nrewrite_idle_seconds = 600\nrewrite_seconds = 600\n".replace(
        f"{limit} = 600", f"{limit} = 0.2"
    )
    mount.start()
    path = mount.path / "log"
    path.write_bytes(OLD)
    with open(path, "wb", buffering=0) as file:

        def written_and_replaced() -> bool:
            if not pauses or file.tell() == 0:
                file.write(b"line\n")
            return replaced(mount, path)

        wait_until(written_and_replaced, "the new file in the old one's place")
        written = path.read_bytes()
        mount.kill()
    mount.start()
    assert path.read_bytes() == written == b"line\n" * (len(written) // 5)


@pytest.mark.parametrize("name", ["lost", "lost.jsonl"])
def test_a_dirty_file_whose_live_file_was_taken_away_blocks_no_other_and_no_unmount(
    mount: FaultyMount, name: str
) -> None:
    path, other = mount.path / name, mount.path / "other"
    path.write_bytes(b"1\n")
    mount.remount()
    with open(path, "ab") as file:
        file.write(b"2\n")
    other.write_bytes(NEW)
    live = live_file(mount, path)
    live.unlink()
    said = len(mount.log())
    mount.stop()
    assert f"its live file {live} is missing" in mount.log()[said:]
    mount.start()
    assert other.read_bytes() == NEW
    assert errno_of(path.read_bytes) == errno.EIO
    assert [(finding["kind"], finding["path"]) for finding in mount.fsck()] == [("missing", name)]
    mount.stop()
    assert [(finding["kind"], finding["path"]) for finding in mount.fsck()] == [("missing", name)]
