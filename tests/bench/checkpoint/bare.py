"""Sends a file from its mapping over a plain socket: ``python -m ... PORT FILE NBYTES``."""

import mmap
import socket
import sys
from pathlib import Path

_PIECE = 1 << 20


def main() -> None:
    """Wait for a byte, then send."""
    port, path, nbytes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        view = memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.recv(1)
        for at in range(view.nbytes - nbytes, view.nbytes, _PIECE):
            line.sendall(view[at : at + _PIECE])


if __name__ == "__main__":
    main()
