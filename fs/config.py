"""Every limit of deltapool in one place, and the configuration file that may change some of them.

The file is TOML: `[limits]` holds the fields of `Limits` below by name; `[options]` and `[[rule]]` belong to the
class rules (see `classes`); `[fuse]` holds `poll` and `renegotiate`, both true, which are there to be switched off
when a kernel misbehaves. Pure: text in, values out.
"""

import dataclasses
import tomllib

from deltapool.fs.classes import Rules
from deltapool.fs.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one mount. Times in seconds, sizes in bytes; units come last in the names."""

    commit_delay_seconds: float = 0.01  # an acknowledged name waits at most this long for its COMMIT
    commit_operations: int = 64  # ... or for this many operations
    settle_seconds: float = 2.0  # dirty work is made durable and noted this often
    rewrite_idle_seconds: float = 2.0  # a rewritten file that is still open replaces the old one after such a pause
    rewrite_seconds: float = 10.0  # ... or so long after it was truncated
    note_seconds: float = 1.0  # changed journals are made durable and noted this often
    journal_idle_seconds: float = 5.0  # a journal without a change for this long loses its dirty mark
    hold_back_seconds: float = 1.0  # a truncated journal without a write for this long is truncated for real
    reap_seconds: float = 0.5  # removed live files are freed this long after their removal, at most
    inodes_cached: int = 100_000
    open_live_files: int = 1 << 20  # of those that agents have open, so many are kept open here
    sync_each_files: int = 32  # more dirty files than this are made durable by one syncfs
    threads: int = 32
    wal_checkpoint_bytes: int = 4 << 20
    wal_reserve_bytes: int = 4 << 20  # WAL space that is allocated before an operation is acknowledged
    wal_reserve_least_bytes: int = 1 << 20  # below this not even a removal is accepted
    reserve_bytes: int = 64 << 20  # disk that work may not use; at most 2 % of the disk
    space_check_seconds: float = 0.25
    space_check_bytes: int = 4 << 20
    inline_read_bytes: int = 1 << 20  # a larger read goes to a thread at once
    inspect_bytes: int = 64 << 20  # a larger file becomes a journal without having been looked through for NULs
    patch_ranges: int = 1024  # changed ranges of a journal that are told apart
    control_request_bytes: int = 1 << 16
    log_bytes: int = 4 << 20
    log_files: int = 3
    dead_check_seconds: float = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    limits: Limits
    rules: Rules
    poll: bool = True  # see `loop`
    renegotiate: bool = True  # see `init`


def parse(text: str, source: str) -> Config:
    """The configuration in TOML `text`; `source` names it in messages.

    Raises ConfigError (or its child RuleError, with the line) for anything that is not understood."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from None
    chosen = document.get("limits", {})
    if not isinstance(chosen, dict):
        raise ConfigError(f"{source}: [limits] must be a table")
    known = {field.name: field for field in dataclasses.fields(Limits)}
    values: dict[str, float] = {}
    for name, value in chosen.items():
        if name not in known:
            raise ConfigError(f"{source}: [limits] has no {name!r}; known are {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{source}: limits.{name} must be a number above 0, not {value!r}")
        if isinstance(known[name].default, int) and not isinstance(value, int):
            raise ConfigError(f"{source}: limits.{name} must be a whole number, not {value!r}")
        values[name] = value
    switches = document.get("fuse", {})
    if (
        not isinstance(switches, dict)
        or not set(switches) <= {"poll", "renegotiate"}
        or not all(isinstance(v, bool) for v in switches.values())
    ):
        raise ConfigError(f"{source}: [fuse] holds poll and renegotiate, true or false")
    limits = dataclasses.replace(Limits(), **values)  # type: ignore[arg-type]
    return Config(limits, Rules.parse(text, source), **switches)


def defaults() -> Config:
    return Config(Limits(), Rules.defaults())
