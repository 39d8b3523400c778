"""Directories that call themselves caches: those with a valid CACHEDIR.TAG, if the rule file asks for it.

The tag is a file whose first bytes are a fixed signature (bford.info/cachedir). It counts for what lies below its
directory, never for the whole volume. Which directories have one is found at mount and kept up to date when such a
file is released, renamed or removed.
"""

from deltapool.fs.errors import FilesystemError
from deltapool.fs.inode import ROOT, Ino
from deltapool.fs.inodes import Inodes

NAME = b"CACHEDIR.TAG"
SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"


class Tags:
    def __init__(self, inodes: Inodes) -> None:
        self.inodes = inodes
        self.enabled = inodes.rules.cachedir_tag
        if self.enabled:
            for directory in inodes.namespace.directories_with(NAME):
                if self._is_valid(directory):
                    inodes.tagged.add(directory)

    def concerns(self, name: bytes) -> bool:
        return self.enabled and name == NAME

    def changed(self, directory: Ino) -> bool:
        """Looks at a directory whose tag may have come, changed or gone. True if the classes below it must be decided
        anew."""
        valid = self._is_valid(directory)
        if directory == ROOT or valid == (directory in self.inodes.tagged):
            return False
        if valid:
            self.inodes.tagged.add(directory)
        else:
            self.inodes.tagged.discard(directory)
        return True

    def _is_valid(self, directory: Ino) -> bool:
        try:
            tag = self.inodes.child(directory, NAME)
            if tag is None or not tag.is_file or tag.size < len(SIGNATURE):
                return False
            live = tag.live or self.inodes.store.open(tag.ino)
            try:
                return live.read(0, len(SIGNATURE)) == SIGNATURE
            finally:
                if live is not tag.live:
                    live.close()
        except (FilesystemError, OSError):
            return False
