"""How answers look on a terminal. Names are bytes: what a terminal might take for a command is shown escaped."""

import datetime
import sys
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

WIDE = 10_000  # columns: what is not read on a terminal is not folded
out = rich.console.Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)


def status(answer: dict[str, Any]) -> None:
    grid = rich.table.Table.grid(padding=(0, 2))
    for key, value in answer.items():
        grid.add_row(key.replace("_", " "), rich.text.Text(_readable(value)))
    out.print(grid)


def journals(listed: list[dict[str, Any]]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("journal", overflow="fold")
    for column in ("bytes", "lines", "last append (UTC)", "written", "changed", "read"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in listed:
        figures = [str(each[name]) for name in ("bytes", "lines")]
        counts = [str(each[name]) for name in ("bytes_written", "bytes_changed", "bytes_read")]
        table.add_row(rich.text.Text(printable(each["path"])), *figures, _utc(each["last_append_ns"]), *counts)
    out.print(table)


def printable(text: str) -> str:
    """The text with everything escaped that is no printable character, bytes that are no UTF-8 included."""
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    data = character.encode("utf-8", "surrogateescape")
    return data.decode("latin-1").encode("unicode_escape").decode()


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_readable(each)}" for key, each in value.items())
    return "no" if value is None or value is False else "yes" if value is True else printable(str(value))


def _utc(nanoseconds: int) -> str:
    return datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
