"""A chunk: a run of bytes, named by its digest.

The digest is the SHA-256 of the plaintext. It is an identity: the pool is shared and agents write hostile bytes, so
nobody may be able to make two chunks of one name. The same plaintext is the same chunk, however it is stored.
"""

import hashlib
from typing import Final, NewType

Digest = NewType("Digest", bytes)
"""Of a chunk: SHA-256, 32 bytes. (`digest` has those of journals, which are no identities.)"""

CHUNK_DIGEST_BYTES: Final = 32
CHUNK_BYTES_MAX: Final = 4 << 20


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    return Digest(hashlib.sha256(data).digest())
