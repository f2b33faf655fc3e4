"""Memory as the body of a request, without a copy."""

import io
from collections.abc import Iterator, Sequence


class Window:
    """A readable, seekable row of memory pieces; `read` returns slices of them."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        self.nbytes = sum(piece.nbytes for piece in self.pieces)
        self._at = 0

    def __len__(self) -> int:
        return self.nbytes

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return the next bytes; all of them when no size is given, none at the end."""
        if size is None or size < 0:
            rest = b"".join(self._from(self._at, self.nbytes))
            self._at = self.nbytes
            return rest
        for piece in self._from(self._at, min(self.nbytes, self._at + size)):
            self._at += piece.nbytes
            return piece
        return b""

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; only requests that are sent again do."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def _from(self, start: int, end: int) -> Iterator[memoryview]:
        at = 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(end - at, piece.nbytes)
            if low < high:
                yield piece[low:high]
            at += piece.nbytes


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
