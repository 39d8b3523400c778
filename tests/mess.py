"""Everything that agents do to journals, at once and by chance, in processes that share a few files."""

import errno
import os
import random
from os import O_APPEND, O_CREAT, O_RDWR, O_TRUNC, O_WRONLY

from scenarios import append, edit_mapped, rewrite, s3_replace, s7_tail_surgery


class Mess:
    """One process that does anything to a few journals that others use too. Whatever it finds gone, it leaves alone."""

    NAMES = ("a.jsonl", "b.jsonl", "c.jsonl", "d.txt", "e.jsonl.bak")

    def __init__(self, folder: str, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.seed, self.held = seed, list[int]()

    def step(self, number: int) -> None:
        chance = self.chance
        path, other = (f"{self.folder}/{chance.choice(self.NAMES)}" for _ in range(2))
        line = b'{"by": %d, "n": %d, "text": "%s"}\n' % (
            self.seed,
            number,
            chance.randbytes(chance.choice((5, 900))).hex().encode(),
        )
        try:
            size = os.stat(path).st_size
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            size, content = 0, b""
        at = chance.randrange(size + 1)
        match chance.randrange(16):
            case 0 | 1 | 2:
                append(os, path, line)
            case 3:
                rewrite(os, path, [content, line])
            case 4:
                rewrite(os, path, [content[:at], line])
            case 5:
                s3_replace(
                    os, path, chance.choice((content + line, content[at:] + line, line)), f"tmp{self.seed}-{number}"
                )
            case 6:
                s3_replace(os, path, content + line, f"tmp{self.seed}-{number}.jsonl")
            case 7:
                s7_tail_surgery(os, path, at // 2, at)
            case 8:
                os.truncate(path, chance.choice((0, at, size + 70_000)))
            case 9:
                self._hold(path, line, at)
            case 10:
                os.rename(path, other)
            case 11:
                os.link(path, f"{other}.{self.seed}-{number}.jsonl")
            case 12:
                os.unlink(path)
            case 13 if size < 3 << 20:
                append(os, path, chance.randbytes(600_000))
            case 14:
                own = (
                    f"{self.folder}/mapped-{self.seed}.jsonl"  # who truncates a file that another has mapped kills him
                )
                append(os, own, line)
                edit_mapped(own, chance.randrange(4), line[:-4])
            case _:
                fd = os.open(path, O_WRONLY | O_CREAT)
                os.pwrite(fd, line, at)
                os.close(fd)

    def _hold(self, path: str, line: bytes, at: int) -> None:
        """Descriptors stay open, beyond the file's name maybe, and are used again."""
        if len(self.held) > 3:
            os.close(self.held.pop(0))
        self.held.append(os.open(path, O_RDWR | O_CREAT | self.chance.choice((0, O_APPEND, O_TRUNC))))
        fd = self.chance.choice(self.held)
        os.pwrite(fd, line, at)
        os.ftruncate(fd, self.chance.choice((0, at, at + len(line))))
        os.write(fd, line)


def mess(folder: str, seed: int, count: int) -> None:
    made = Mess(folder, seed)
    for number in range(count):
        try:
            made.step(number)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EEXIST):
                raise  # a size that was true when it was asked for
