"""Deletes what was committed from the disk: exactly what was uploaded, and nothing else.

A folder first gets a hidden name, so that no trainer ever takes one that is half gone for a whole
one. What was changed or added meanwhile stays, and gets its name back.
"""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.watched.disk import Look, Seen, look
from checkpointing.watched.documents import Part

_TRASH: Final = re.compile(r"\.(.+)\.(\d{6})\.everstep-deleting", re.DOTALL)
_BLOCK: Final = 8 << 20
IsOurs = Callable[[Path, str], bool]
"""Tells whether the file at a path, with a name in the entry, is what was uploaded."""


def delete(path: Path, seen: Look, version: int) -> bool:
    """Delete an entry that is as it was seen; False when something of it had to stay.

    Args:
        path: The entry.
        seen: What was uploaded and committed.
        version: Of the commit.
    """
    if look(path) != seen:
        return False
    if seen.single:
        path.unlink()
        return True
    trash = path.with_name(f".{path.name}.{version:06d}.everstep-deleting")
    path.rename(trash)

    def is_ours(file: Path, name: str) -> bool:
        return Seen.of(file.lstat()) == seen.files.get(name)

    return empty(trash, path, seen.files, seen.links, seen.folders, is_ours)


def left_over(directory: Path) -> list[tuple[Path, str, int]]:
    """Return deletions that were interrupted: the hidden folder, its entry and commit's version."""
    with os.scandir(directory) as found:
        matches = [(entry.path, _TRASH.fullmatch(entry.name)) for entry in found]
    return [(Path(path), match[1], int(match[2])) for path, match in matches if match]


def finish(trash: Path, target: Path, part: Part) -> bool:
    """Go on with a deletion that was interrupted; what is left is compared by its bytes."""
    files = {file.path: file for file in part.files}

    def is_ours(path: Path, name: str) -> bool:
        file = files.get(name)
        return file is not None and path.lstat().st_size == file.nbytes and _crc(path) == file.crc64

    return empty(trash, target, files, part.links, part.folders, is_ours)


def empty(
    trash: Path,
    target: Path,
    files: Iterable[str],
    links: Iterable[tuple[str, str]],
    folders: Iterable[str],
    is_ours: IsOurs,
) -> bool:
    """Delete what is ours from a hidden folder; what is left gets its name back.

    Returns:
        Whether nothing was left.
    """
    for name in files:
        path = trash / name
        with suppress(FileNotFoundError):
            if not path.is_symlink() and is_ours(path, name):
                path.unlink()
    for name, link_target in links:
        path = trash / name
        with suppress(FileNotFoundError, OSError):
            if os.readlink(path) == link_target:  # noqa: PTH115 - as it is, not as a path
                path.unlink()
    for name in sorted(folders, reverse=True):  # what is inside of a folder before itself
        with suppress(OSError):
            (trash / name).rmdir()
    try:
        trash.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        if not os.path.lexists(target):
            trash.rename(target)
        return False
    return True


def _crc(path: Path) -> int:
    crc = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while block := file.read(_BLOCK):
            crc = crc64(block, crc)
    return crc
