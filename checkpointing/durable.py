"""Files that outlive a crash: every byte written, every name in its folder."""

import os
from pathlib import Path


def write_all(fd: int, body: bytes) -> None:
    """Write every byte: one call may take only some of them."""
    view = memoryview(body)
    while view:
        view = view[os.write(fd, view) :]


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power failure, as a new file's."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
