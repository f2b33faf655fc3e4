"""A restart pays for no import of everstep's own: the zygote has what a restore comes to need."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from checkpointing.commit import UploadRecord, commit
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig, open_store
from checkpointing.uploader.send import send
from orchestrator.agent.ranks import OWN_MODULES

RESTORE = """
import importlib, sys

for name in sys.argv[2:]:
    importlib.import_module(name)
before = set(sys.modules)

import numpy as np
from checkpointing import Checkpointer
from checkpointing.restore import Point, restore_from_store
from checkpointing.store.base import StoreConfig, open_store

Checkpointer.from_env({})
open_store(StoreConfig(url="s3://bucket/prefix", region="us-east-1"))
state = {"w": np.zeros(8)}
store = open_store(StoreConfig(url=sys.argv[1]))
restore_from_store(store, "r", Point(step=5, attempt=1), 0, 1, state, None)
assert state["w"][7] == 7
print(sorted(name for name in set(sys.modules) - before if name.startswith("checkpointing")))
"""


def test_nothing_of_everstep_is_left_to_import_when_ranks_restore(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    url = folder.as_uri()
    _commit(url, tmp_path / "arena")
    argv = [sys.executable, "-c", RESTORE, url, *OWN_MODULES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def _commit(url: str, path: Path) -> None:
    Stager(path, attempt=1, rank=0, world=1).stage(5, {"w": np.arange(8.0)}, None)
    store, arena = open_store(StoreConfig(url=url)), MappedArena(path)
    sent = send(store, "r", arena, arena.staged()[0])
    record = UploadRecord(rank=0, index_key=sent.index_key, index_crc64=sent.index_crc64)
    assert commit(store, "r", 5, 1, [record], 1, "w").committed
    arena.close()
