"""The engine behind `torch.distributed.checkpoint`: one argument, and planners as they are.

dcp.save(state, storage_writer=EverstepWriter("s3://bucket/run/step-100"))
dcp.async_save(state, storage_writer=EverstepWriter("s3://bucket/run/step-100"))
dcp.load(state, storage_reader=EverstepReader("s3://bucket/run/step-100"))
"""

from checkpointing.dcp.folders import fetch, keep
from checkpointing.dcp.location import find_checkpoints
from checkpointing.dcp.reader import EverstepReader
from checkpointing.dcp.stager import EverstepStager
from checkpointing.dcp.writer import EverstepWriter

__all__ = [
    "EverstepReader",
    "EverstepStager",
    "EverstepWriter",
    "fetch",
    "find_checkpoints",
    "keep",
]
