"""Commits states to a folder, as ranks, uploader and supervisor would."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing import keys
from checkpointing.checksum import combine, crc64
from checkpointing.commit import CommitOutcome, UploadRecord, commit
from checkpointing.leaves import BLOCK, bytes_of, dtype_of, shape_of
from checkpointing.manifest import Index, skeleton_crc64
from checkpointing.plan import Extent
from checkpointing.sharded import as_sharded, is_sharded
from checkpointing.store.base import ObjectStore
from checkpointing.store.directory import DirectoryStore
from checkpointing.tree import flatten

State = Mapping[str, Any]


def store_at(folder: Path) -> DirectoryStore:
    folder.mkdir(exist_ok=True)
    return DirectoryStore(folder)


def weights(step: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    model = {f"layers.{i}.w": (rng.random((6, i + 2)) * scale).astype("f4") for i in range(4)}
    return {"model": model, "optimizer": {"m": rng.random(40), "lr": 0.1}, "epoch": step}


def save(
    store: ObjectStore,
    run: str,
    step: int,
    attempt: int = 1,
    *,
    state: Callable[[int], State] | None = None,
    world: int = 2,
) -> CommitOutcome:
    """Commit `state(rank)` of each rank; rank 0 uploads what is replicated."""
    records = upload(store, run, step, attempt, state=state, world=world)
    return commit(store, run, step, attempt, records, world, f"{run}/{attempt}/{step}")


def upload(
    store: ObjectStore,
    run: str,
    step: int,
    attempt: int = 1,
    *,
    state: Callable[[int], State] | None = None,
    world: int = 2,
) -> list[UploadRecord]:
    make = state or (lambda _: weights(step))
    return [_upload(store, (run, step, attempt, rank), make(rank), world) for rank in range(world)]


def _upload(
    store: ObjectStore, place: tuple[str, int, int, int], state: State, world: int
) -> UploadRecord:
    run, step, attempt, rank = place
    flat, local = flatten(state), flatten({"rng": np.full(4, rank)})
    extents: list[Extent] = []
    parts: list[bytes] = []
    end = 0
    for kind, half in (("state", flat), ("local", local)):
        for name, leaf in half.leaves.items():
            raw = bytes_of(leaf)
            assert raw is not None
            data = raw.tobytes()
            shard = as_sharded(leaf) if is_sharded(leaf) else None
            mine = kind == "local" or rank == 0 or (shard is not None and shard.copy == 0)
            blocks = [crc64(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            extents.append(
                Extent(
                    name=name,
                    kind="local" if kind == "local" else "shard" if shard else "replica",
                    owner=rank if mine else -1 if shard else 0,
                    dtype=dtype_of(leaf),
                    shape=shape_of(leaf),
                    offset=end if mine else -1,
                    nbytes=len(data),
                    crc64=crc64(data),
                    whole=shard.shape if shard else (),
                    start=shard.start if shard else (),
                    blocks=tuple(blocks) if kind == "state" and len(blocks) > 1 else (),
                )
            )
            if mine:
                parts.append(data)
                end += len(data)
    crc = combine((crc64(part), len(part)) for part in parts)
    data_key = keys.data_key(*place) if end else ""
    if data_key:
        store.upload(data_key, [memoryview(part) for part in parts if part], crc)
    index = Index(
        run=run,
        step=step,
        attempt=attempt,
        rank=rank,
        world=world,
        data_key=data_key,
        data_nbytes=end,
        data_crc64=crc,
        skeleton=flat.skeleton if rank == 0 else None,
        skeleton_crc64=skeleton_crc64(flat.skeleton),
        local_skeleton=local.skeleton,
        extents=tuple(extents),
    )
    packed = index.pack()
    store.put_if_absent(keys.index_key(*place), packed)
    return UploadRecord(rank=rank, index_key=keys.index_key(*place), index_crc64=crc64(packed))
