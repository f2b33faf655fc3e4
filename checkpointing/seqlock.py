"""A record in shared memory with one writer and any number of readers.

The sequence number is odd while the writer is inside. A reader that sees the same even number
before and after, and a matching CRC, has a whole record; a writer that dies inside leaves an odd
number, which no reader takes for a record. The CRC covers what the sequence number cannot promise
on machines that reorder stores.
"""

import struct
import zlib
from typing import Final

_READ_TRIES: Final = 64


class Record:
    """One fixed-size record at an 8-aligned place of a buffer.

    Args:
        view: Writable (or, for readers only, read-only) bytes of the record: `size_of(fmt)` long.
        fmt: `struct` format of the payload, with its byte order.
    """

    HEADER: Final = 16  # sequence number, CRC

    def __init__(self, view: memoryview, fmt: str) -> None:
        self._struct = struct.Struct(fmt)
        self._words = view[: self.HEADER].cast("Q")
        self._payload = view[self.HEADER : self.HEADER + self._struct.size]

    @classmethod
    def size_of(cls, fmt: str) -> int:
        """Bytes that a record of this format takes."""
        return cls.HEADER + struct.calcsize(fmt)

    @property
    def sequence(self) -> int:
        """The sequence number: 0 never written, odd while the writer is inside."""
        return int(self._words[0])

    def begin(self) -> None:
        """Mark what the record describes as being changed, until the next `write`."""
        self._words[0] |= 1

    def write(self, *values: float) -> None:
        """Replace the record."""
        payload = self._struct.pack(*values)
        # 8-byte aligned words are stored by one instruction: a reader sees the old or the new.
        inside = self._words[0] | 1
        self._words[0] = inside
        self._payload[:] = payload
        self._words[1] = zlib.crc32(payload)
        self._words[0] = inside + 1

    def read(self) -> tuple[float, ...] | None:
        """Return the values, or None when nothing whole was seen in a bounded number of tries."""
        for _ in range(_READ_TRIES):
            before = self._words[0]
            if before == 0:
                return None
            if before & 1:
                continue
            payload = bytes(self._payload)
            crc = self._words[1]
            if self._words[0] == before and zlib.crc32(payload) == crc:
                return self._struct.unpack(payload)
        return None

    def release(self) -> None:
        """Let go of the buffer, so that its mapping can be closed."""
        self._words.release()
        self._payload.release()
