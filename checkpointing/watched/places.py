"""Where a watched directory must not be: what lies there would be taken for a trainer's. Pure."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_NO_DISK: Final = (Path("/proc"), Path("/sys"))


def folder_of(url: str) -> Path | None:
    """Return the folder that a store is, None for one that is no folder."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def conflict(directory: Path, pattern: str, others: Mapping[str, Path]) -> str:
    """Say in one line why no trainer's checkpoints can be in a directory, "" when they can.

    Args:
        directory: The watched one, without links in it, as the others.
        pattern: Which of its entries are uploaded, and perhaps deleted.
        others: Folders that hold something else, by what a person calls them.
    """
    if any(directory.is_relative_to(top) for top in _NO_DISK):
        return f"{directory} holds no files that a trainer could write"
    for name, other in others.items():
        if directory.is_relative_to(other):
            return f"{directory} is inside of {name} ({other})"
        if other.is_relative_to(directory):
            entry = other.relative_to(directory).parts[0]
            if fnmatchcase(entry, pattern):
                return f"{pattern!r} there matches {entry!r}, with {name} in it ({other})"
    return ""
