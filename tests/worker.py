"""Executes the workload of one seed in a directory, as a process of its own, and says in a log how far it came.

    worker.py SEED DIRECTORY LOG OPERATIONS

The log lies outside of the mount: `b 17` before operation 17 begins, `d 17` when it was acknowledged. What an operation
is follows from the seed (`workload`). The worker ends when the filesystem under it is gone; any other failure, and any
answer that is not what POSIX says, ends it with a traceback.

It starts with the mount as its working directory and works relative to that: once the mount is gone nothing may land in
the folder under it.
"""

import ctypes
import errno
import os
import sys

from workload import CHUNK_BYTES, SLOT_BYTES, Op, Script

GONE = (errno.ENOTCONN, errno.ECONNABORTED)
RENAME_EXCHANGE = 2
OPEN_MAX = 60
AT_FDCWD = -100


class Worker:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.descriptors: dict[tuple[int, int], int] = {}  # (file, number) -> opened for appending
        self.slow: dict[int, int] = {}  # file -> opened with O_TRUNC, being rewritten

    def execute(self, op: Op) -> None:
        getattr(self, f"_do_{op.kind}")(op)

    def _number(self, path: str) -> int:
        return int(self.script.tree[path][1])

    def _do_create(self, op: Op) -> None:
        fd = os.open(op.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        write(fd, op.data)
        os.close(fd)

    def _do_append(self, op: Op) -> None:
        key = self._number(op.path), op.number
        if key not in self.descriptors:
            while len(self.descriptors) >= OPEN_MAX:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            self.descriptors[key] = os.open(op.path, os.O_WRONLY | os.O_APPEND)
        write(self.descriptors[key], op.data, len(op.data))
        size = len(self.script.file(op.path).content)
        assert os.stat(op.path).st_size == os.fstat(self.descriptors[key]).st_size == size, (op.path, size)

    def _do_rewrite(self, op: Op) -> None:
        fd = os.open(op.path, os.O_WRONLY | os.O_TRUNC)
        write(fd, op.data)
        os.close(fd)
        assert os.stat(op.path).st_size == len(op.data)

    def _do_begin(self, op: Op) -> None:
        self.slow[self._number(op.path)] = os.open(op.path, os.O_WRONLY | os.O_TRUNC)

    def _do_piece(self, op: Op) -> None:
        write(self.slow[op.number], op.data)

    def _do_finish(self, op: Op) -> None:
        fd = self.slow.pop(op.number)
        write(fd, op.data)
        os.close(fd)

    def _do_slot(self, op: Op) -> None:
        fd = os.open(op.path, os.O_WRONLY)
        assert os.pwrite(fd, op.data, op.number * SLOT_BYTES) == SLOT_BYTES
        os.close(fd)

    def _do_fsync(self, op: Op) -> None:
        """Through a descriptor that wrote, or one that may not even write."""
        mine = [fd for (number, _), fd in self.descriptors.items() if number == self._number(op.path)]
        if mine and op.number:
            os.fsync(mine[0])
            return
        fd = os.open(op.path, os.O_WRONLY if op.number else os.O_RDONLY)
        os.fsync(fd) if op.number else os.fdatasync(fd)
        os.close(fd)

    def _do_fsyncdir(self, op: Op) -> None:
        fd = os.open(op.path or ".", os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)

    def _do_mkdir(self, op: Op) -> None:
        os.mkdir(op.path)

    def _do_rmdir(self, op: Op) -> None:
        os.rmdir(op.path)

    def _do_rename(self, op: Op) -> None:
        os.rename(op.path, op.to)

    def _do_exchange(self, op: Op) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(AT_FDCWD, op.path.encode(), AT_FDCWD, op.to.encode(), RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), "renameat2")

    def _do_link(self, op: Op) -> None:
        os.link(op.path, op.to)

    def _do_unlink(self, op: Op) -> None:
        os.unlink(op.path)

    def _do_symlink(self, op: Op) -> None:
        os.symlink(op.to, op.path)


def write(fd: int, data: bytes, piece_bytes: int = CHUNK_BYTES) -> None:
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes]
        count = os.write(fd, piece)
        if count != len(piece):  # no wonder if the mount went meanwhile, else wrong
            os.listdir(".")  # asks the daemon
            raise AssertionError(f"{count} of {len(piece)} bytes written")


def main(seed: str, directory: str, log_path: str, operations: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    script = Script(seed)
    worker = Worker(script)
    try:
        os.mkdir(directory)
        os.chdir(directory)
        for number in range(int(operations)):
            op = script.step()
            os.write(log, b"b %d\n" % number)
            worker.execute(op)
            os.write(log, b"d %d\n" % number)
    except OSError as error:
        if error.errno not in GONE:
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
