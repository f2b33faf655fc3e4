"""Memory as the body of a request, without a copy."""

import io
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.store.pace import Pacer

_SIP: Final = 1 << 20


class Cancelled(OSError):
    """Nobody waits for this request any more."""


class Window:
    """A row of memory pieces."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def crc64(self) -> int:
        """Return the CRC64NVME of the bytes as they are now."""
        crc = 0
        for piece in self.pieces:
            crc = crc64(piece, crc)
        return crc

    def slices(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield what lies between two positions, piece by piece."""
        at = 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(end - at, piece.nbytes)
            if low < high:
                yield piece[low:high]
            at += piece.nbytes


class Body:
    """Reads a window once, as fast as the budget allows.

    `read` returns slices of the memory, and larger ones than it is asked for: HTTP clients ask for
    16 KiB, and a call for each of those costs more than the sending.

    Args:
        window: What to read.
        pace: Makes the reader wait; None for a reader that does not send.
        cancelled: Set by others to make the request fail.
    """

    def __init__(
        self, window: Window, pace: Pacer | None = None, cancelled: threading.Event | None = None
    ) -> None:
        self.waited_s = 0.0
        self._window = window
        self._pace = pace
        self._cancelled = cancelled
        self._at = 0

    def __len__(self) -> int:
        return self._window.nbytes

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return the next bytes; all of them when no size is given, none at the end."""
        if size is None or size < 0:
            rest = b"".join(self._window.slices(self._at, self._window.nbytes))
            self._sent(len(rest))
            return rest
        sip = self._pace.sip() if self._pace is not None else _SIP
        for piece in self._window.slices(self._at, min(len(self), self._at + max(size, sip))):
            self._sent(piece.nbytes)
            return piece
        return b""

    def readinto(self, out: memoryview) -> int:
        """Fill `out` with the next bytes, for clients that have their own buffer."""
        done = 0
        for piece in self._window.slices(self._at, min(len(self), self._at + out.nbytes)):
            out[done : done + piece.nbytes] = piece
            done += piece.nbytes
        self._at += done
        return done

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; only requests that are sent again do."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def _sent(self, count: int) -> None:
        if self._cancelled is not None and self._cancelled.is_set():
            raise Cancelled("another sending of this part was faster, or the upload has failed")
        if self._pace is not None and count:
            self.waited_s += self._pace.nbytes(count)
        self._at += count


def split(pieces: Sequence[memoryview], size: int) -> list[Window]:
    """Cut a row of pieces into windows of `size` bytes, the last one shorter."""
    windows, current, room = [], [], size
    for whole in pieces:
        piece = whole.cast("B")
        while piece.nbytes:
            taken = piece[:room]
            current.append(taken)
            room -= taken.nbytes
            piece = piece[taken.nbytes :]
            if room == 0:
                windows.append(Window(current))
                current, room = [], size
    if current:
        windows.append(Window(current))
    return windows
