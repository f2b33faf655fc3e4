"""What a trainer has on disk: seen without following links, and whether it is finished."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from checkpointing.watched.documents import leads_out

_TEMPORARY_ENDS: Final = (".tmp", ".temp", ".part", ".partial", ".incomplete")
_TEMPORARY_STARTS: Final = (".tmp", ".nfs")


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as it was: no write leaves all of this as it is."""

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    mode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Seen":
        """Take what matters."""
        return cls(
            nbytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            inode=found.st_ino,
            device=found.st_dev,
            mode=stat.S_IMODE(found.st_mode),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """An entry of the watched directory at one moment.

    Attributes:
        single: It is a file.
        files: By path below the entry, sorted; of a single file its own name.
        folders: Folders below it.
        links: Links that stay inside, with their targets.
        odd: What cannot be kept: links that lead out, sockets, devices.
        temporary: Files whose names say that somebody still writes.
    """

    single: bool
    files: Mapping[str, Seen]
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    odd: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()

    @property
    def newest_ns(self) -> int:
        """When something of it was changed last, by the clock of the file system."""
        return max((seen.ctime_ns for seen in self.files.values()), default=0)


def entries(directory: Path, pattern: str) -> Iterator[str]:
    """Yield the names that the pattern matches: folders and files, no links, nothing hidden.

    Raises:
        OSError: The directory cannot be read; that it is not there yet is no error.
    """
    try:
        with os.scandir(directory) as found:
            for entry in found:
                if entry.name.startswith(".") or not fnmatchcase(entry.name, pattern):
                    continue
                if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                    yield entry.name
    except FileNotFoundError:
        return


def look(path: Path) -> Look:
    """Look at an entry.

    Raises:
        FileNotFoundError: It, or something in it, went away while this looked.
        OSError: It cannot be read.
    """
    found = path.lstat()
    if stat.S_ISREG(found.st_mode):
        temporary = (path.name,) if is_temporary(path.name) else ()
        return Look(single=True, files={path.name: Seen.of(found)}, temporary=temporary)
    files: dict[str, Seen] = {}
    folders: list[str] = []
    links: list[tuple[str, str]] = []
    odd: list[str] = []
    unfinished: list[str] = []
    for name, entry in sorted(_walk(path, ""), key=lambda one: one[0]):
        if entry.is_symlink():
            target = os.readlink(entry.path)  # noqa: PTH115 - as it is, not as a path
            if leads_out(name, target):
                odd.append(name)
            else:
                links.append((name, target))
        elif entry.is_dir(follow_symlinks=False):
            folders.append(name)
        elif entry.is_file(follow_symlinks=False):
            # Not what the directory said: on a network file system that may be old.
            files[name] = Seen.of(os.lstat(entry.path))
            if is_temporary(entry.name):
                unfinished.append(name)
        else:
            odd.append(name)
    return Look(
        single=False,
        files=files,
        folders=tuple(folders),
        links=tuple(links),
        odd=tuple(odd),
        temporary=tuple(unfinished),
    )


def is_temporary(name: str) -> bool:
    """Tell a name that writers give to what they have not finished."""
    return name.endswith(_TEMPORARY_ENDS) or name.startswith(_TEMPORARY_STARTS)


def _walk(folder: Path, below: str) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    with os.scandir(folder) as found:
        inside = list(found)
    for entry in inside:
        name = f"{below}{entry.name}"
        yield name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{name}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Tells when a trainer has finished an entry.

    Attributes:
        how: `marker`, a file of that name is in it; `rename`, it has its name from the moment on
            that it is whole; `quiet`, nothing in it changed for a while.
        marker: Path of the marker in the folder.
        quiet_s: The while.
    """

    how: str = "quiet"
    marker: str = ""
    quiet_s: float = 60.0

    def __call__(self, seen: Look, unchanged_s: float) -> bool:
        """Decide from a look, and how long every look has been like this one."""
        if seen.temporary or not seen.files:
            return False
        if self.how == "marker":
            return self.marker in seen.files
        return self.how == "rename" or unchanged_s >= self.quiet_s
