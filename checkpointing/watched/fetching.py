"""Brings a committed entry back to the disk, where it appears when all of it is there."""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpointing.checksum import combine, crc64
from checkpointing.durable import fsync_folder
from checkpointing.errors import RestoreFailed
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.commits import Committed, read_part
from checkpointing.watched.documents import File, Part, check_paths

PARTIAL: Final = ".everstep-partial"
_THREADS: Final = 4
_SPARE_BYTES: Final = 64 << 20


def fetch(
    store: ObjectStore, prefix: str, committed: Committed, directory: Path, node: str = ""
) -> Path:
    """Write an entry into a directory: a node's own part, or the parts of all as one folder.

    Args:
        store: Where it is.
        prefix: What it is kept under.
        committed: Which.
        directory: Where it shall appear under its own name.
        node: Whose part, if it has one.

    Raises:
        FileExistsError: There is one of its name.
        RestoreFailed: Bytes fail their CRC, or the nodes' parts do not go together.
        StoreError: The store could not deliver.
    """
    commit = committed.commit
    target = directory / commit.entry
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: exists")
    refs = [ref for ref in commit.parts if ref.node == node] or commit.parts
    parts = [read_part(store, prefix, commit, ref) for ref in refs]
    _check_together(parts)
    directory.mkdir(parents=True, exist_ok=True)
    _check_room(directory, sum(part.nbytes for part in parts))
    place = directory / f".{secrets.token_hex(8)}{PARTIAL}"
    single = parts[0].single
    try:
        place.mkdir(mode=0o700)
        for part in parts:
            _write(store, prefix, part, place)
        # Only now: another node's part may have a file too, and it may be one that is only read.
        for path, file in {file.path: file for part in parts for file in part.files}.items():
            _settle(place / path, file)
        _finish_folder(place, parts)
        whole = place / commit.entry if single else place
        if os.path.lexists(target):  # a rename would replace a file, and an empty folder
            raise FileExistsError(f"{target}: exists")
        whole.rename(target)
        fsync_folder(directory)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return target


def _check_together(parts: Sequence[Part]) -> None:
    if len({part.single for part in parts}) > 1:
        raise RestoreFailed("a file on some nodes and a folder on others")
    sums: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    for part in parts:
        for file in part.files:
            held = (file.nbytes, file.crc64)
            if sums.setdefault(file.path, held) != held:
                raise RestoreFailed(f"{file.path}: differs between nodes; say whose with --node")
        for path, target in part.links:
            if links.setdefault(path, target) != target:
                raise RestoreFailed(f"{path}: differs between nodes; say whose with --node")
    if odd := links.keys() & sums.keys():
        raise RestoreFailed(f"{min(odd)}: a link on one node and a file on another")
    check_paths(links.keys() | sums.keys(), {path for part in parts for path in part.folders})


def _check_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if nbytes + _SPARE_BYTES > free:
        raise RestoreFailed(f"{directory}: {free} bytes are free, {nbytes} are needed")


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a piece that belong to one file."""

    file: File
    at: int
    nbytes: int


def _spans(part: Part) -> Iterator[list[_Span]]:
    """Yield for each piece which of its bytes belong where."""
    files = iter([file for file in part.files if file.nbytes])
    file, at = next(files, None), 0
    for piece in part.pieces:
        spans, room = [], piece.nbytes
        while room and file is not None:
            count = min(room, file.nbytes - at)
            spans.append(_Span(file, at, count))
            room, at = room - count, at + count
            if at == file.nbytes:
                file, at = next(files, None), 0
        yield spans


def _write(store: ObjectStore, prefix: str, part: Part, place: Path) -> None:
    sums: dict[str, list[tuple[int, int]]] = {file.path: [] for file in part.files}

    def piece(number: int, spans: Sequence[_Span]) -> list[int]:
        held = part.pieces[number]
        key = names.piece_key(prefix, part.entry, part.node, number, held.nbytes, held.crc64)
        room = memoryview(bytearray(held.nbytes))
        store.read_into(key, 0, room)
        if crc64(room) != held.crc64:
            raise RestoreFailed(f"{key}: its bytes fail their CRC")
        found, start = [], 0
        for span in spans:
            own = room[start : start + span.nbytes]
            start += span.nbytes
            found.append(crc64(own))
            _put(place / span.file.path, span.at, own)
        return found

    for file in part.files:
        path = place / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("wb").close()  # another node's part may have it, and then has the same
    layout = list(_spans(part))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(piece, n, spans) for n, spans in enumerate(layout)]
        try:
            for spans, future in zip(layout, futures, strict=True):
                for span, crc in zip(spans, future.result(), strict=True):
                    sums[span.file.path].append((crc, span.nbytes))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for file in part.files:
        if combine(sums[file.path]) != file.crc64:
            raise RestoreFailed(f"{part.entry}/{file.path}: its bytes fail their CRC")


def _put(path: Path, at: int, data: memoryview) -> None:
    with _opened(path) as descriptor:
        while data.nbytes:
            count = os.pwrite(descriptor, data, at)
            data, at = data[count:], at + count


def _settle(path: Path, file: File) -> None:
    with _opened(path) as descriptor:
        os.fchmod(descriptor, file.mode)
        os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
        os.fsync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _finish_folder(place: Path, parts: Sequence[Part]) -> None:
    """Make what is no file; links last, so that nothing was ever written through one."""
    for part in parts:
        for folder in part.folders:
            (place / folder).mkdir(parents=True, exist_ok=True)
    for part in parts:
        for link, to in part.links:
            path = place / link
            if not os.path.lexists(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(to)
    place.chmod(0o755)
    for base, _, _ in os.walk(place):
        fsync_folder(Path(base))
