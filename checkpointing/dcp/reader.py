"""DCP's way out of a store: `dcp.load(state, storage_reader=EverstepReader("s3://bucket/prefix"))`."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkpointing import leaves
from checkpointing.boxes import Box, whole
from checkpointing.dcp import values
from checkpointing.dcp.document import Chunk, unpack
from checkpointing.dcp.exchange import fetch_once
from checkpointing.dcp.location import Location, Where, as_url, bounded, newest, supported
from checkpointing.errors import ManifestInvalid, RestoreFailed
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.store.base import ObjectStore

_SCRATCH: Final = 1 << 30  # what does not go straight into place is read in batches of this


class EverstepReader(StorageReader):
    """Reads what `EverstepWriter` committed; every byte is checked against its CRC.

    Of several saves to one id the newest counts, the same one on all ranks. Only what the plan of
    this rank needs is read, in parallel, into the tensors themselves where they are CPU memory.

    Args:
        url: As for `EverstepWriter`.
        endpoint_url: S3 endpoint; else `AWS_ENDPOINT_URL`, else AWS.
        region: S3 region.
        allow_cast: Convert where the dtype of a tensor is not the stored one, which is an error
            otherwise.
        deadline_s: Longest that this rank's reads may take.
    """

    def __init__(
        self,
        url: Where = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        allow_cast: bool = False,
        deadline_s: float = 1800.0,
    ) -> None:
        super().__init__()
        base = as_url(url) if url else ""
        self._base = Location(url=base, endpoint_url=endpoint_url, region=region)
        self._location = self._base
        self._allow_cast = allow_cast
        self._deadline_s = deadline_s
        self._commit = ""
        self._chunks: dict[MetadataIndex, Chunk] = {}

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint."""
        return self._location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Tell whether this is a URL or path that can be read."""
        return supported(checkpoint_id)

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Turn to another checkpoint."""
        if checkpoint_id:
            self._location = self._base.at(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of the newest save.

        Raises:
            ObjectMissing: Nothing is committed here.
            ManifestInvalid: The document is altered; nothing older is taken in its place.
        """
        # Were a parameter named "kwargs", DCP would ask again, for metadata of a single rank.
        if not self._location.url:
            raise ValueError("no checkpoint: give a url, or a checkpoint_id to DCP")
        what = f"metadata of {self._location.url}"
        return bounded(self._read_metadata, self._deadline_s, what)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002 - DCP's signature
        *_: Any,
        **__: Any,
    ) -> None:
        """Take what `read_metadata` returned."""
        self._chunks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which save this rank is about to read."""
        return replace(plan, storage_data=self._commit)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks are about to read the same save.

        Raises:
            RestoreFailed: Another one was committed just between.
        """
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise RestoreFailed(
                f"{self._location.url}: saved again while it was being loaded (ranks found "
                f"{' and '.join(found)}); load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank.

        Raises:
            RestoreFailed: Bytes fail their CRC, or a tensor has another dtype than was stored.
            StoreError: Not everything could be read.
        """
        done: Future[None] = Future()
        what = f"load from {self._location.url}"
        done.set_result(bounded(lambda: self._read(plan, planner), self._deadline_s, what))
        return done

    def _read_metadata(self) -> Metadata:
        store = self._location.open()
        commit = newest(store, self._location.url)
        where = f"{self._location.url}/{commit.key}"
        try:
            metadata = unpack(fetch_once(where, lambda: store.get(commit.key)))
        except ManifestInvalid as error:
            raise ManifestInvalid(f"{where}: {error}") from error
        self._commit = commit.key
        metadata.storage_meta = StorageMeta(checkpoint_id=self._location.url)
        return metadata

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        store = self._location.open()
        plain = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        self._read_values(store, plain, planner)
        tensors = (item for item in plan.items if item.type is not LoadItemType.BYTE_IO)
        for batch in _batches(self._target(item, planner) for item in tensors):
            wanted = [target.source for target in batch if isinstance(target.source, Wanted)]
            parts = [target.source for target in batch if isinstance(target.source, Part)]
            fill_from_store(store, wanted, parts)
            for target in batch:
                if target.scratch is not None:
                    with torch.no_grad():
                        target.tensor.copy_(target.scratch)
                planner.commit_tensor(target.item, target.tensor)

    def _read_values(
        self, store: ObjectStore, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        found = [self._chunk(item) for item in items]
        room = [np.empty(chunk.nbytes, np.uint8) for chunk in found]
        names = [item.storage_index.fqn for item in items]
        fill_from_store(
            store,
            [
                Wanted(extent=chunk.extent(name), key=chunk.stored.key, out=out)
                for chunk, out, name in zip(found, room, names, strict=True)
            ],
        )
        for item, out in zip(items, room, strict=True):
            stream = io.BytesIO()
            # The planner unpickles what it is given: never what was stored, but this, made here.
            torch.save(values.unpack(out.tobytes()), stream)
            stream.seek(0)
            planner.load_bytes(item, stream)

    def _chunk(self, item: ReadItem) -> Chunk:
        found = self._chunks.get(item.storage_index)
        if found is None:
            raise RestoreFailed(f"{item.storage_index.fqn}: planned, and not in the checkpoint")
        return found

    def _target(self, item: ReadItem, planner: LoadPlanner) -> "_Target":
        chunk, name = self._chunk(item), item.storage_index.fqn
        tensor = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != tuple(item.lengths):
            raise RestoreFailed(
                f"{name}: the planner gave room for {list(tensor.shape)}, not {list(item.lengths)}"
            )
        dtype = leaves.dtype_of(tensor)
        if dtype != chunk.dtype and not self._allow_cast:
            raise RestoreFailed(
                f"{name}: stored as {chunk.dtype}, the state has {dtype}; nothing is cast unless "
                "EverstepReader(..., allow_cast=True) asks for it"
            )
        return _target(item, chunk, tensor, same=dtype == chunk.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A piece of a live tensor and what fills it.

    Attributes:
        item: What DCP wants.
        tensor: The piece.
        scratch: Is filled first and then copied, where the piece cannot be filled by itself.
        source: What is read.
    """

    item: ReadItem
    tensor: torch.Tensor
    scratch: torch.Tensor | None
    source: Wanted | Part


def _target(item: ReadItem, chunk: Chunk, tensor: torch.Tensor, *, same: bool) -> _Target:
    items = _raw_items(tensor) if same else None
    scratch = None
    if items is None:
        scratch = torch.empty(tuple(tensor.shape), dtype=values.dtype_named(chunk.dtype))
        items = _raw_items(scratch)
        assert items is not None
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    extent, key = chunk.extent(item.storage_index.fqn), chunk.stored.key
    source: Wanted | Part = Part(extent=extent, key=key, box=box, out=items)
    if box == whole(chunk.shape) and items.flags.c_contiguous:
        source = Wanted(extent=extent, key=key, out=items.reshape(-1).view(np.uint8))
    return _Target(item=item, tensor=tensor, scratch=scratch, source=source)


def _raw_items(tensor: torch.Tensor) -> NDArray[np.void] | None:
    """Return a tensor's elements in place, as so many bytes each; None when they are elsewhere."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    size = tensor.element_size()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), f"V{size}")
    sized = _SIZED.get(size)
    array: NDArray[Any] = (tensor.view(sized) if sized else tensor).numpy()
    items: NDArray[np.void] = array.view(f"V{size}")
    return items


_SIZED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _batches(targets: Iterable[_Target]) -> Iterator[list[_Target]]:
    """Yield what is read together: as much as there is, but little that has to be copied again."""
    batch: list[_Target] = []
    room = 0
    for target in targets:
        size = target.scratch.nbytes if target.scratch is not None else 0
        if batch and room + size > _SCRATCH:
            yield batch
            batch, room = [], 0
        batch.append(target)
        room += size
    if batch:
        yield batch
