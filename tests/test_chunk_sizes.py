"""What the sizes of chunks were chosen for: three loads, and what storing them may take. See decision 0009."""

import base64
import json
import random

import zstandard
from storing import Pool

from deltapool.cas.chunking import WHOLE_BYTES_MAX

MB = 1_000_000


def test_a_megabyte_at_the_front_of_200_costs_three() -> None:
    rng, pool = random.Random(1), Pool()
    data = rng.randbytes(200 * MB)
    recipe = pool.rewrite(data)
    pool.rewrite(rng.randbytes(MB) + data, recipe)
    assert pool.new_bytes <= 3 * MB


def test_a_record_of_a_large_state_costs_two_chunks() -> None:
    rng, pool = random.Random(2), Pool()
    state = {f"record-{number}": {"value": rng.randbytes(180).hex(), "count": number} for number in range(126_000)}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in state.items()]

    def whole() -> bytes:
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    assert 51 * MB < len(whole()) < 54 * MB
    recipe = pool.rewrite(whole())
    for _ in range(5):
        lines[rng.randrange(len(lines))] = json.dumps({"value": rng.randbytes(rng.randrange(150, 210)).hex()})
        recipe = pool.rewrite(whole(), recipe)
        assert pool.new_chunks <= 2
        assert pool.new_bytes < 30_000


class Text:
    """Lines of words, some of which are frequent: about as compressible as source code."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        letters = "etaoinshrdlucmfwyp"
        self.words = ["".join(self.rng.choices(letters, k=self.rng.randrange(2, 11))) for _ in range(3000)]

    def line(self) -> str:
        words = (self.words[min(2999, int(self.rng.paretovariate(0.7)))] for _ in range(self.rng.randrange(3, 12)))
        return "    " * self.rng.randrange(4) + " ".join(words) + "\n"

    def file(self, size: int) -> list[str]:
        lines: list[str] = []
        while size > 0:
            lines.append(self.line())
            size -= len(lines[-1])
        return lines


def test_forty_checkpoints_cost_two_and_a_half() -> None:
    """Each rewritten whole; two percent of the files changed, others each time, by some lines."""
    text, pool = Text(3), Pool()
    files = {f"src/module_{number}.py": text.file(text.rng.randrange(3_000, 17_000)) for number in range(300)}
    recipe, contents = None, []
    for step in range(40):
        for name in text.rng.sample(sorted(files), 6) if step else ():
            at = text.rng.randrange(len(files[name]))
            files[name][at : at + text.rng.randrange(4)] = [text.line() for _ in range(text.rng.randrange(1, 4))]
        encoded = {name: base64.b64encode("".join(lines).encode()).decode() for name, lines in files.items()}
        data = json.dumps({"step": step, "files": encoded}).encode()
        assert 3.8 * MB < len(data) < 4.5 * MB
        recipe = pool.rewrite(data, recipe)
        contents.append((recipe, data))
    one = len(zstandard.ZstdCompressor(level=3).compress(contents[0][1]))
    assert pool.bytes_stored <= 2.5 * one
    assert all(pool.content(recipe) == data for recipe, data in contents)


def test_a_line_of_a_source_file_costs_a_delta() -> None:
    text, pool = Text(4), Pool()
    lines = text.file(100_000)
    recipe = pool.rewrite("".join(lines).encode())
    for _ in range(50):
        lines[text.rng.randrange(len(lines))] = text.line()
        data = "".join(lines).encode()
        assert len(data) < WHOLE_BYTES_MAX
        recipe = pool.rewrite(data, recipe)
        assert pool.content(recipe) == data
        assert pool.new_bytes < 5_000
