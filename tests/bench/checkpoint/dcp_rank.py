"""A rank of DCP's: `python -m tests.bench.checkpoint.dcp_rank NBYTES TOKENS`; see `serve`.

Runs in the peers' environment, so it imports nothing of ours but the training.
"""

import sys
import time
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from tests.bench.checkpoint.children import die_with_parent, serve
from tests.bench.checkpoint.training import Training, together

REGION = "us-east-1"


class Rank:
    """What the bench asks of a rank."""

    def __init__(self, nbytes: int, tokens: int) -> None:
        self._training = Training(nbytes, tokens)
        self._stager: DefaultStager | None = None
        self._upload: Any = None
        self._writer = ""
        self._type = AsyncCheckpointerType.THREAD

    def describe(self) -> dict[str, Any]:
        return {"nbytes": self._training.nbytes, "tensors": len(self._training.locals)}

    def prepare(self, writer: str, process: bool, kept: bool, shared: bool, thread: bool) -> None:
        """Choose a way to save.

        Args:
            writer: `s3fs` or `s3torchconnector`.
            process: Write in DCP's process, not in a thread.
            kept: Stage with one stager for all saves; otherwise with the writer's own.
            shared: Stage into shared memory.
            thread: Stage in a thread.
        """
        self._writer = writer
        if process:
            self._type = AsyncCheckpointerType.PROCESS
        if kept:
            # What is left out needs a GPU.
            self._stager = DefaultStager(StagingOptions(False, shared, thread, False))

    def save(self, path: str) -> float:
        """Save; the time until the state may change."""
        writer = self._new_writer(path)
        begun = together()
        answer = dcp.async_save(
            self._training.state,
            storage_writer=writer,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result()
            self._upload = answer.upload_completion
        else:
            self._upload = answer
        return time.perf_counter() - begun

    def wait(self) -> float:
        """Wait for the upload; how long it took from now on."""
        begun = time.perf_counter()
        self._upload.result()
        dist.barrier()
        return time.perf_counter() - begun

    def _new_writer(self, path: str) -> Any:
        if self._writer == "s3fs":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            # There is no file to sync; asked for it, the writer syncs the whole machine.
            return FsspecWriter(path, sync_files=False)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter

        style = S3ClientConfig(force_path_style=True)
        return S3StorageWriter(region=REGION, path=path, s3client_config=style)


def main() -> None:
    die_with_parent()
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]))
    names = ("describe", "prepare", "save", "wait")
    serve({name: getattr(rank, name) for name in names})


if __name__ == "__main__":
    main()
