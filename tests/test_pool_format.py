"""docs/format.md on what the pool holds: its chapters name the constants of the code."""

import re
from pathlib import Path

import pytest

from deltapool.cas import body, chunk, pack, recipe

TEXT = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")


def chapter(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str, columns: int) -> dict[str, list[str]]:
    """The rows of the tables with so many columns, by what they are about."""
    cells = [
        [cell.strip().strip("`") for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    named = {True: 2, False: 0}
    return {row[named[row[0].isdigit()]]: row for row in cells if len(row) == columns}


def test_the_chapter_on_bodies() -> None:
    text = chapter("Chunk body")
    fields = rows(text, 4)
    assert int(fields["magic"][3], 16) == body.MAGIC
    assert int(fields["format"][3]) == body.FORMAT
    assert fields["key id"][3].startswith(f"{body.NO_KEY}`: none")
    assert int(fields["payload"][0]) == body.HEADER_BYTES
    stored = body.encode(b"x" * 1000)
    offset, size = (int(cell) for cell in fields["plaintext length L"][:2])
    assert int.from_bytes(stored[offset : offset + size], "big") == 1000
    assert stored[int(fields["codec"][0])] == body.Codec.ZSTD
    codecs = {name.upper(): int(row[1]) for name, row in rows(text, 3).items() if row[1].isdigit()}
    assert codecs == {codec.name: codec.value for codec in body.Codec}
    assert f"1 byte to {chunk.CHUNK_BYTES_MAX >> 20} MiB\n(`CHUNK_BYTES_MAX`)" in text
    assert f"{body.DELTA_BYTES_MAX >> 10} KiB (`DELTA_BYTES_MAX`)" in text
    assert f"at least {body._BASE_BYTES_MIN} bytes" in text


def test_the_chapter_on_recipes() -> None:
    text = chapter("Recipe")
    fields = rows(text.split("### Version")[0], 3)
    assert f"`{recipe.MAGIC:#04X}`".replace("X", "x", 1) in fields["magic"][1] + "`"
    assert fields["version"][1].endswith(str(recipe.VERSION))
    assert f"`{recipe.HAS_BASE:#04x}` has a base" in fields["flags"][1]
    assert fields["checksum"][1].startswith(f"{recipe.CHECKSUM_BYTES} bytes")
    kinds = {name: row[1] for name, row in rows(text, 4).items()}
    assert kinds["chunk"] == f"4 × length + `{recipe.KIND_CHUNK}"
    assert kinds["hole"] == f"4 × length + `{recipe.KIND_HOLE}"
    assert kinds["copy"] == f"4 × count + `{recipe.KIND_COPY}"
    assert f"{recipe.ENTRIES_MAX:,} entries\n(`ENTRIES_MAX`)" in text
    assert f"{recipe.LENGTH_MAX + 1 >> 60} EiB − 1 byte (`LENGTH_MAX`)" in text


def test_the_chapter_on_packs() -> None:
    text = chapter("Pack")
    parts, fields = rows(text, 3), rows(text, 4)
    assert parts["footer"][1] == f"{pack.ENTRY_BYTES} for each body"
    assert int(parts["trailer"][1]) == pack.TRAILER_BYTES == int(fields["number of bodies"][0])
    assert fields["magic"][3] == pack.MAGIC.decode()
    assert fields["version"][3] == f"{pack.VERSION}`, big-endian"
    assert f"{pack.PACK_BYTES_MAX >> 20} MiB (`PACK_BYTES_MAX`)" in text
    ends = [(int(row[0]), int(row[1])) for name, row in fields.items() if row[0].isdigit()]
    assert all(end - size == after for (end, size), (after, _) in zip(ends, [*ends[1:], (0, 0)], strict=True))


@pytest.mark.parametrize(
    ("title", "version"), [("Chunk body", body.FORMAT), ("Recipe", recipe.VERSION), ("Pack", pack.VERSION)]
)
def test_each_chapter_has_the_present_version(title: str, version: int) -> None:
    assert re.search(rf"^\| {version} \|", chapter(title), re.MULTILINE)
