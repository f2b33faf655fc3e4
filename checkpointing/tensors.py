"""Whole tensors of a committed checkpoint, put together from their pieces, in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from checkpointing.boxes import whole
from checkpointing.errors import ManifestInvalid
from checkpointing.leaves import Bytes
from checkpointing.manifest import Manifest, Shard
from checkpointing.plan import Extent
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.store.base import ObjectStore

BATCH: Final = 256 << 20
_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """A tensor by name, and what is stored of it.

    Attributes:
        name: Path in the state, parts joined by "/".
        dtype: Name of the element type.
        shape: Shape of the whole.
        pieces: One extent, or one per piece of a sharded tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def parts(self) -> list[str]:
        """The parts of its path, as the state has them."""
        return [part.replace("~1", "/").replace("~0", "~") for part in self.name.split("/")]


def whole_tensors(manifest: Manifest) -> list[WholeTensor]:
    """Return all tensors of the state, sorted by name."""
    by_name: dict[str, list[Extent]] = {}
    for extent in manifest.tensors:
        by_name.setdefault(extent.name, []).append(extent)
    return [
        WholeTensor(name=name, dtype=held[0].dtype, shape=held[0].global_shape, pieces=tuple(held))
        for name, held in sorted(by_name.items())
    ]


def below(tensors: Iterable[WholeTensor], subtree: str) -> list[WholeTensor]:
    """Return the tensors of a subtree, "" for all."""
    prefix = f"{subtree.strip('/')}/" if subtree.strip("/") else ""
    return [t for t in tensors if t.name.startswith(prefix) or t.name == prefix[:-1]]


def read_tensors(
    store: ObjectStore, manifest: Manifest, wanted: Iterable[tuple[WholeTensor, Bytes]]
) -> None:
    """Fill the given bytes, each as long as its tensor, row by row; verified on the way.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        StoreError: The store could not deliver.
    """
    found: list[Wanted] = []
    parts: list[Part] = []
    for tensor, out in wanted:
        for piece in tensor.pieces:
            key = manifest.shards[piece.owner].data_key
            if not piece.nbytes:
                continue
            if piece.box == whole(tensor.shape):
                found.append(Wanted(extent=piece, key=key, out=out))
                continue
            rows = out.view(f"V{piece.nbytes // piece.box.volume}").reshape(tensor.shape)
            place = rows[piece.box.slices()]
            parts.append(Part(extent=piece, key=key, box=whole(piece.shape), out=place))
    fill_from_store(store, found, parts)


def read_batch(store: ObjectStore, manifest: Manifest, batch: Sequence[WholeTensor]) -> list[Bytes]:
    """Return the bytes of tensors, in their order."""
    rooms = [np.empty(tensor.nbytes, dtype=np.uint8) for tensor in batch]
    read_tensors(store, manifest, zip(batch, rooms, strict=True))
    return rooms


def batches(tensors: Iterable[WholeTensor], most: int = BATCH) -> Iterator[list[WholeTensor]]:
    """Cut into batches of bounded bytes; a larger tensor is alone."""
    batch: list[WholeTensor] = []
    nbytes = 0
    for tensor in tensors:
        if batch and nbytes + tensor.nbytes > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch


def require_objects(store: ObjectStore, manifest: Manifest) -> None:
    """Check that the objects are there and as long as is said, before room is made for them.

    Raises:
        ManifestInvalid: They are not.
        StoreError: The store could not be asked.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="head") as pool:
        for problem in pool.map(lambda shard: missing(store, shard), manifest.shards):
            if problem:
                raise ManifestInvalid(problem)


def missing(store: ObjectStore, shard: Shard) -> str:
    """Say what is wrong with the size of an object, "" for nothing."""
    if not shard.data_key:
        return ""
    info = store.head(shard.data_key)
    if info is None:
        return f"{shard.data_key}: does not exist"
    if info.nbytes != shard.data_nbytes:
        return f"{shard.data_key}: has {info.nbytes} bytes, {shard.data_nbytes} are said"
    return ""
