"""Numbers and fields as the formats have them: what the codecs of deltas and of recipes share.

A varint is an unsigned number of 64 bits, 7 bits a byte, lowest first (LEB128), in its shortest form: a value has
exactly one encoding. A `Cursor` takes values from bytes that are all there, and says Malformed, with the reason, where
they are none. What a damaged record is called, and where it stands, is for the codec to add.
"""


class Malformed(Exception):
    """These bytes are not what the format says. The text completes a sentence about the record."""


class Cursor:
    """Takes values from a record's body, and never a byte beyond it."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def byte(self) -> int:
        if self._at >= len(self._view):
            raise Malformed("its body ends within a value")
        self._at += 1
        return self._view[self._at - 1]

    def bytes(self, size: int) -> bytes:
        if size > self.left:
            raise Malformed("its body ends within a value")
        self._at += size
        return bytes(self._view[self._at - size : self._at])

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise Malformed("a number has more than 64 bits")
        if value >> 64 or (byte == 0 and shift):
            raise Malformed("a number is not in its shortest form, or has more than 64 bits")
        return value

    def end(self) -> None:
        if self.left:
            raise Malformed(f"{self.left} bytes follow its body")


def varint(value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is no unsigned number of 64 bits")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
