"""Files that other processes read, and that outlive a crash: whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Put a JSON value in the place of a file; a reader sees all of the old or of the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


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
