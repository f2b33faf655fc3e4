"""DCP's way into a store: `dcp.save(state, storage_writer=EverstepWriter("s3://bucket/prefix"))`.

Written against the abstract classes. torch's own file writer loses errors of its threads, which
then commit a checkpoint that misses tensors.
"""

import secrets
import time
import warnings
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkpointing.dcp.document import Chunk, pack
from checkpointing.dcp.location import Location, Where, as_url, bounded, put_commit, supported
from checkpointing.dcp.sending import batches, pack_values, send
from checkpointing.dcp.stager import shared_stager

_Staged = dict[str, Any] | ThreadFuture[dict[str, Any]]


class EverstepWriter(StorageWriter, AsyncStager):
    """Stores a state dict as raw bytes with a CRC each, and commits it as a whole or not at all.

    Nothing is overwritten: saving again to the same id leaves the old save in place and readable
    until the new one is committed. Planners are DCP's own. With `dcp.async_save` it is the stager
    as well.

    Args:
        url: `s3://bucket/prefix`, `file:///folder` or a path; a `checkpoint_id` given to DCP is
            taken relative to it. One that is given there only may be absent here.
        endpoint_url: S3 endpoint; else `AWS_ENDPOINT_URL`, else AWS.
        region: S3 region.
        deadline_s: Longest that one rank's upload, or the commit, may take.
        stager: Stages for `dcp.async_save`; else one that all writers of this process share.
            For its process mode give one with `process=True`.
    """

    def __init__(
        self,
        url: Where = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        deadline_s: float = 1800.0,
        stager: AsyncStager | None = None,
    ) -> None:
        super().__init__()
        base = as_url(url) if url else ""
        self._base = Location(url=base, endpoint_url=endpoint_url, region=region)
        self._location = self._base
        self._deadline_s = deadline_s
        self._stager = stager
        self._rank = 0
        self._nonce = secrets.token_hex(8)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stager behind: DCP sends the writer to another process to do the rest."""
        return {**self.__dict__, "_stager": None}

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint."""
        return self._location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Tell whether this is a URL or path that can be written."""
        return supported(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Tell planners where it goes."""
        return StorageMeta(checkpoint_id=self._location.url, save_id=self._nonce)

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id:
            self._location = self._base.at(checkpoint_id)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - DCP's signature
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Take the rank; every save has names of its own.

        Raises:
            ValueError: No place to write to, or `use_collectives=False`: nobody would know
                whether all ranks are done.
        """
        if not self._location.url:
            raise ValueError("no checkpoint: give a url, or a checkpoint_id to DCP")
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False leaves nobody to commit the checkpoint as a whole"
            )
        self._rank = int(kwargs.get("rank", 0))
        self._nonce = secrets.token_hex(8)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store the items of this rank.

        Raises:
            TypeError: A value that would have to be pickled; nothing is stored.
            StoreError: Not everything could be stored; the save fails on all ranks.
        """
        done: Future[list[WriteResult]] = Future()
        what = f"upload of rank {self._rank} to {self._location.url}"
        done.set_result(bounded(lambda: self._write(plan, planner), self._deadline_s, what))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: check that nothing is missing, and write the document that makes it count.

        Raises:
            CommitRefused: Not all of the state is there.
        """
        chunks: dict[MetadataIndex, Chunk] = {
            result.index: result.storage_data for rank in results for result in rank
        }
        about = {
            "save": self._nonce,
            "saved_at": round(time.time(), 3),
            "ranks": len(results),
            "torch": str(torch.__version__),
        }
        packed = pack(metadata, chunks, about)
        what = f"commit to {self._location.url}"
        store = self._location.open(make=True)
        bounded(lambda: put_commit(store, packed, self._nonce), self._deadline_s, what)
        metadata.storage_data = chunks
        metadata.storage_meta = self.storage_meta()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """As the stager says."""
        return self._own_stager().should_synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> _Staged:
        """Copy a state dict, so that training may go on."""
        return self._own_stager().stage(state_dict)

    def synchronize_staging(self) -> None:
        """Wait for the copy."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still called
            self._own_stager().synchronize_staging()

    def close(self) -> None:
        """Give back the memory of a stager that was given."""
        if self._stager is not None:
            self._stager.close()

    def _own_stager(self) -> AsyncStager:
        return self._stager or shared_stager()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        store = self._location.open(make=True)
        packed = pack_values(plan, planner)
        folder = f"data/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
        results: list[WriteResult] = []
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-upload") as pool:
            sending: ThreadFuture[list[WriteResult]] | None = None
            for number, batch in enumerate(batches(packed, plan, planner)):
                key = f"{folder}/rank-{self._rank:05d}-{number:04d}.bin"
                if sending is not None:
                    results += sending.result()  # while the next was copied
                sending = pool.submit(send, store, key, batch)
            results += sending.result() if sending is not None else []
        return results
