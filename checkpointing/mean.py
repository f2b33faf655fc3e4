"""Adds up tensors of several checkpoints and rounds their mean once, in bounded memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpointing import dtypes
from checkpointing.leaves import Bytes, sums_of
from checkpointing.manifest import Manifest
from checkpointing.plan import Extent
from checkpointing.spool import Spool, spool
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import WholeTensor, batches, read_tensors

_BATCH: Final = 16 << 20  # its sums take up to eight times as much
_MOST_MEMORY: Final = 8 * _BATCH
_CHUNK: Final = 1 << 20


def write_means(
    store: ObjectStore,
    manifests: Sequence[Manifest],
    columns: Sequence[Sequence[WholeTensor]],
    extents: Sequence[Extent],
    held: Spool,
    scratch: Path,
) -> list[Extent]:
    """Write the mean of each column to its extent; return the extents with their CRCs.

    Args:
        store: Holds the checkpoints.
        manifests: Theirs.
        columns: By tensor, what each checkpoint has of it, all of one type and shape.
        extents: Where each result goes, and its type; what holds no floats is taken from the first.
        held: The file of the results.
        scratch: Folder for what is too large for memory.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        StoreError: The store could not deliver.
    """
    place = {extent.name: extent for extent in extents}
    rows = {column[0].name: column for column in columns}
    filled: list[Extent] = []
    for batch in batches((column[0] for column in columns), _BATCH):
        out = {t.name: held.room(place[t.name].offset, place[t.name].nbytes) for t in batch}
        _average_batch(store, manifests, [rows[t.name] for t in batch], place, out, scratch)
        for name, room in out.items():
            crc, blocks = sums_of(room)
            filled.append(replace(place[name], crc64=crc, blocks=blocks))
        start = place[batch[0].name].offset
        held.settle(start, filled[-1].offset + filled[-1].nbytes - start)
    return filled


def _average_batch(
    store: ObjectStore,
    manifests: Sequence[Manifest],
    columns: Sequence[Sequence[WholeTensor]],
    place: Mapping[str, Extent],
    out: Mapping[str, Bytes],
    scratch: Path,
) -> None:
    floats = [column for column in columns if dtypes.is_floating(column[0].dtype)]
    others = [column for column in columns if not dtypes.is_floating(column[0].dtype)]
    read_tensors(store, manifests[0], [(column[0], out[column[0].name]) for column in others])
    nbytes = [column[0].nbytes for column in floats]
    counts = [int(np.prod(column[0].shape, dtype=np.int64)) for column in floats]
    with (
        _room(scratch / "read", sum(nbytes)) as read,
        _room(scratch / "sums", 8 * sum(counts)) as added,
    ):
        rooms = _cut(read, nbytes)
        sums = [part.view(np.float64) for part in _cut(added, [8 * count for count in counts])]
        for number, manifest in enumerate(manifests):
            wanted = [column[number] for column in floats]
            read_tensors(store, manifest, zip(wanted, rooms, strict=True))
            for tensor, room, total in zip(wanted, rooms, sums, strict=True):
                _add(total, room, tensor.dtype)
        for column, total in zip(floats, sums, strict=True):
            name = column[0].name
            _round(total, len(manifests), place[name].dtype, out[name])


@contextmanager
def _room(path: Path, nbytes: int) -> Iterator[Bytes]:
    """Give room that is zero: memory, or for much of it a file that the system can page out."""
    if nbytes <= _MOST_MEMORY:
        yield np.zeros(nbytes, dtype=np.uint8)
        return
    with spool(path, nbytes, keep=False) as held:
        yield held.room(0, nbytes)


def _cut(room: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    ends = np.cumsum([0, *sizes])
    return [room[a:b] for a, b in pairwise(ends)]


def _add(total: NDArray[np.float64], raw: Bytes, dtype: str) -> None:
    if not total.size:
        return
    size = raw.nbytes // total.size
    with np.errstate(invalid="ignore", over="ignore"):
        for at in range(0, total.size, _CHUNK):
            part = raw[at * size : (at + _CHUNK) * size]
            total[at : at + _CHUNK] += dtypes.values(part, dtype)


def _round(total: NDArray[np.float64], count: int, dtype: str, room: Bytes) -> None:
    if not total.size:
        return
    encode: Callable[[NDArray[np.float64]], Bytes] = dtypes.encoder(dtype)
    size = room.nbytes // total.size
    for at in range(0, total.size, _CHUNK):
        room[at * size : (at + _CHUNK) * size] = encode(total[at : at + _CHUNK] / count)
