"""DCP's way out of a store: `dcp.load(state, storage_reader=EverstepReader("s3://bucket/prefix"))`."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkpointing import leaves
from checkpointing.dcp import native, values
from checkpointing.dcp.document import Chunk, unpack
from checkpointing.dcp.exchange import fetch_once
from checkpointing.dcp.location import (
    Commit,
    Location,
    Where,
    as_url,
    bounded,
    newest,
    supported,
)
from checkpointing.dcp.targets import Target, batches, target_for
from checkpointing.errors import ManifestInvalid, RestoreFailed
from checkpointing.manifest import Manifest
from checkpointing.resolver import CommitInfo
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.store.base import ObjectStore

_LITTLE: Final = 64 << 20


class EverstepReader(StorageReader):
    """Reads what `EverstepWriter` committed; every byte is checked against its CRC.

    Of several saves to one id the newest counts, the same one on all ranks. Only what the plan of
    this rank needs is read, in parallel, into the tensors themselves where they are CPU memory.

    Args:
        url: As for `EverstepWriter`; with `run` that of the run's store.
        run: Name of a run whose own checkpoints, those of `Checkpointer`, are to be read.
        step: Which of them; else the newest.
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
        run: str | None = None,
        step: int | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        allow_cast: bool = False,
        deadline_s: float = 1800.0,
    ) -> None:
        super().__init__()
        base = as_url(url) if url else ""
        self._base = Location(url=base, endpoint_url=endpoint_url, region=region)
        self._location = self._base
        self._run = run
        self._step = step
        self._allow_cast = allow_cast
        self._deadline_s = deadline_s
        self._commit = ""
        self._stored: dict[MetadataIndex, Chunk | native.Inline] = {}

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
        self._stored = metadata.storage_data

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
        commit: Commit | CommitInfo
        if self._run is None:
            commit = newest(store, self._location.url)
        else:
            commit = native.find(store, self._run, self._step)
        where = f"{self._location.url}/{commit.key}"
        understand = unpack if self._run is None else _of_manifest
        packed = fetch_once(where, lambda: store.get(commit.key))
        try:
            try:
                metadata = understand(packed)
            except ManifestInvalid:  # it may be altered on the way only
                metadata = understand(store.get(commit.key))
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
        for batch in batches(self._target(item, planner) for item in tensors):
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
        wanted: list[Wanted] = []
        for item in items:
            found = self._found(item)
            if isinstance(found, native.Inline):
                _give(planner, item, found.value)
                continue
            if found.nbytes > _LITTLE:
                _is_there(store, found)
            out = np.empty(found.nbytes, np.uint8)
            extent = found.extent(item.storage_index.fqn)
            wanted.append(Wanted(extent=extent, key=found.stored.key, out=out))
        fill_from_store(store, wanted)
        stored = (i for i in items if not isinstance(self._found(i), native.Inline))
        for item, filled in zip(stored, wanted, strict=True):
            _give(planner, item, values.unpack(filled.out.tobytes()))

    def _found(self, item: ReadItem) -> Chunk | native.Inline:
        found = self._stored.get(item.storage_index)
        if found is None:
            raise RestoreFailed(f"{item.storage_index.fqn}: planned, and not in the checkpoint")
        return found

    def _target(self, item: ReadItem, planner: LoadPlanner) -> Target:
        chunk, name = self._found(item), item.storage_index.fqn
        if isinstance(chunk, native.Inline):
            raise RestoreFailed(f"{name}: no tensor in the checkpoint")
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
        return target_for(item, chunk, tensor, same=dtype == chunk.dtype)


def _of_manifest(packed: bytes) -> Metadata:
    return native.metadata_of(Manifest.unpack(packed))


def _is_there(store: ObjectStore, chunk: Chunk) -> None:
    """Check that an object is as long as is said, before room is made for what it holds."""
    info = store.head(chunk.stored.key)
    if info is None or info.nbytes != chunk.stored.nbytes:
        raise RestoreFailed(f"{chunk.stored.key}: does not have {chunk.stored.nbytes} bytes")


def _give(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    stream = io.BytesIO()
    # The planner unpickles what it is given: never what was stored, but this, made here.
    torch.save(value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)
