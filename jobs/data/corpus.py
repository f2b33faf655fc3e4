"""The tokens to train on: the standard library's sources, any text, or a token file."""

import logging
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jobs.errors import DataError

STDLIB_BYTES: Final = 8 * 10**6
FOLDER_BYTES: Final = 256 * 2**20
_SKIPPED_FOLDERS: Final = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
)
_SCANNED_TOKENS: Final = 2**24

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A flat sequence of tokens, perhaps a read-only mapping of a file larger than memory.

    Attributes:
        name: what it was read from, for messages.
        tokens: 1-D unsigned integers.
        fingerprint: CRC-32 over length, type and up to 1024 evenly spaced blocks of 4 KiB (the
            whole of a small corpus). A resume on other data is found out by it.
    """

    name: str
    tokens: NDArray[np.unsignedinteger[Any]]
    fingerprint: str


def load_corpus(path: Path | None, *, vocabulary: int) -> Corpus:
    """Open the data; ``None`` means the sources of the running Python's standard library.

    Args:
        path: a folder or file of text (read as bytes), ``.npy`` (one dimension, unsigned integers)
            or ``.bin`` (uint16, little-endian).
        vocabulary: number of different tokens the model knows.

    Raises:
        DataError: it is missing, empty, unreadable, or holds tokens outside the vocabulary.
    """
    try:
        if path is None:
            name, tokens = _stdlib()
        else:
            name, tokens = str(path), _open(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"--data {path}: cannot be read: {reason}") from error
    if tokens.size == 0:
        raise DataError(f"--data {name}: is empty; give a file or folder that holds text")
    check_vocabulary(tokens[:_SCANNED_TOKENS], vocabulary, name)
    return Corpus(name=name, tokens=tokens, fingerprint=_fingerprint(tokens))


def check_vocabulary(tokens: NDArray[np.unsignedinteger[Any]], vocabulary: int, name: str) -> None:
    """Refuse tokens that the embedding has no row for.

    Raises:
        DataError: a token is not below ``vocabulary``.
    """
    if np.iinfo(tokens.dtype).max < vocabulary:
        return
    largest = int(tokens.max())
    if largest >= vocabulary:
        raise DataError(
            f"--data {name}: holds token {largest}, but the model's vocabulary is {vocabulary}"
        )


def _stdlib() -> tuple[str, NDArray[np.uint8]]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = (file for file in _files(root) if file.suffix == ".py")
    return f"the standard library in {root}", _read_all(sources, STDLIB_BYTES)


def _open(path: Path) -> NDArray[np.unsignedinteger[Any]]:
    if not path.exists():
        raise DataError(f"--data {path}: no such file or folder")
    if path.is_dir():
        return _read_all(_files(path), FOLDER_BYTES)
    if path.suffix == ".npy":
        return _open_npy(path)
    size = path.stat().st_size
    if size == 0:
        return np.empty(0, dtype=np.uint8)
    if path.suffix != ".bin":
        return np.memmap(path, dtype=np.uint8, mode="r")
    if size % 2:
        raise DataError(f"--data {path}: a .bin file holds uint16 tokens, but has {size} bytes")
    return np.memmap(path, dtype="<u2", mode="r")


def _open_npy(path: Path) -> NDArray[np.unsignedinteger[Any]]:
    try:
        # Not np.load, which opens zip archives and pickles as well.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"--data {path}: is not a .npy file of plain numbers") from error
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise DataError(
            f"--data {path}: needs one dimension of unsigned integers, "
            f"has shape {tokens.shape} of {tokens.dtype}"
        )
    return tokens


def _files(root: Path) -> Iterator[Path]:
    """Every regular file below a folder in one fixed order, without caches and hidden ones."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and name[0] != "."
        )
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.is_file() and not file.is_symlink():
                yield file


def _read_all(files: Iterator[Path], limit: int) -> NDArray[np.uint8]:
    """Join text files up to a size; binary ones (a NUL in the first KiB) are left out."""
    joined = bytearray()
    for file in files:
        with file.open("rb") as text:
            content = text.read(max(1024, limit - len(joined)))
        if b"\0" in content[:1024]:
            continue
        joined += content
        if len(joined) >= limit:
            logger.debug("data: stopped reading at %d bytes, at %s", limit, file)
            break
    return np.frombuffer(bytes(memoryview(joined)[:limit]), dtype=np.uint8)


def _fingerprint(tokens: NDArray[np.unsignedinteger[Any]]) -> str:
    block = 4096 // tokens.itemsize
    num_blocks = -(-tokens.size // block)
    crc = zlib.crc32(f"{tokens.size} {tokens.dtype.str}".encode())
    for i in range(min(num_blocks, 1024)):
        start = (i * num_blocks // min(num_blocks, 1024)) * block
        crc = zlib.crc32(np.ascontiguousarray(tokens[start : start + block]).tobytes(), crc)
    return f"{crc:08x}"
