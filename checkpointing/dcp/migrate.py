"""Takes a checkpoint that DCP wrote over into a run of everstep.

python -m checkpointing.dcp.migrate /checkpoints/step-100 --store s3://bucket/runs --run mine
"""

import argparse
import re
import secrets
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from checkpointing import keys, leaves
from checkpointing.checksum import combine
from checkpointing.checksum import crc64 as crc64_of
from checkpointing.commit import CommitOutcome, UploadRecord, commit
from checkpointing.dcp.source import MigrationRefused, Piece, Source, batches
from checkpointing.errors import CheckpointingError, ObjectConflict
from checkpointing.manifest import Index, skeleton_crc64
from checkpointing.plan import Extent
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.tree import Node, flatten

_BATCH: Final = 1 << 30
_STEP: Final = re.compile(r"(?:^|[^0-9])([0-9]{1,12})/*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """What became of a migration."""

    outcome: CommitOutcome
    tensors: int
    step: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 with one line that says what is wrong."""
    options = _parser().parse_args(arguments)
    try:
        step = options.step if options.step is not None else step_of(options.source)
        source = Source(
            options.source, trust_pickle=options.trust_pickle, leave_out=options.leave_out
        )
        store = open_store(
            StoreConfig(url=options.store, endpoint_url=options.endpoint_url, region=options.region)
        )
        store.probe()
        found = migrate(source, store, options.run, step)
    except (CheckpointingError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"migrate: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(
        f"step {found.step} of {options.run}: {found.tensors} tensors, "
        f"{found.outcome.nbytes / 2**20:.1f} MiB, {found.outcome.why} as "
        f"{found.outcome.manifest_key}\n"
    )
    return 0


def step_of(where: str) -> int:
    """Return the step that a folder's name ends with.

    Raises:
        MigrationRefused: It ends with no number.
    """
    match = _STEP.search(where)
    if match is None:
        raise MigrationRefused(f"{where}: its name tells no step; give --step")
    return int(match.group(1))


def migrate(source: Source, store: ObjectStore, run: str, step: int) -> Migrated:
    """Write a checkpoint of a run, batch by batch; as many ranks as batches are said to have saved.

    Doing it again after an interruption goes on where nothing is committed yet.

    Raises:
        MigrationRefused: Tensors are not complete.
        TypeError: A value that the engine does not keep.
        StoreError: The store could not take it.
    """
    pieces = source.pieces()
    state, stand_ins = source.state(pieces)
    flat = flatten(state)
    names = {
        stand_ins[id(leaf)]: name for name, leaf in flat.leaves.items() if id(leaf) in stand_ins
    }
    lost = [name for name, leaf in flat.leaves.items() if id(leaf) not in stand_ins]
    if lost:
        raise MigrationRefused(f"{lost[0]}: a tensor inside a Python value")
    by_rank = [
        _upload(source, store, keys.data_key(run, step, 1, rank), rank, batch, names)
        for rank, batch in enumerate(batches(pieces, _BATCH))
    ] or [[]]
    uploads = [
        _index(store, run, step, rank, by_rank, flat.skeleton) for rank in range(len(by_rank))
    ]
    outcome = commit(store, run, step, 1, uploads, len(by_rank), secrets.token_hex(8))
    return Migrated(outcome=outcome, tensors=len(names), step=step)


def _upload(
    source: Source,
    store: ObjectStore,
    key: str,
    rank: int,
    batch: Sequence[Piece],
    names: dict[str, str],
) -> list[Extent]:
    extents, data, offset = [], [], 0
    for piece, tensor in zip(batch, source.read(batch), strict=True):
        raw = leaves.bytes_of(tensor)
        assert raw is not None
        crc, blocks = leaves.sums_of(raw)
        extent = Extent(
            name=names[piece.key],
            kind="replica" if piece.is_whole else "shard",
            owner=rank,
            dtype=leaves.dtype_of(tensor),
            shape=piece.box.shape,
            offset=offset,
            nbytes=raw.nbytes,
            crc64=crc,
            blocks=blocks,
        )
        if not piece.is_whole:
            extent = replace(extent, whole=piece.shape, start=piece.box.start)
        extents.append(extent)
        data.append(raw)
        offset += raw.nbytes
    if offset:
        crc = combine((extent.crc64, extent.nbytes) for extent in extents)
        store.upload(key, [raw.data for raw in data if raw.nbytes], crc)
    return extents


def _index(
    store: ObjectStore,
    run: str,
    step: int,
    rank: int,
    by_rank: Sequence[Sequence[Extent]],
    skeleton: Node,
) -> UploadRecord:
    own = by_rank[rank]
    nbytes = sum(extent.nbytes for extent in own)
    others = [
        replace(extent, offset=-1)
        for number, extents in enumerate(by_rank)
        for extent in extents
        if number != rank and extent.kind == "replica"
    ]
    index = Index(
        run=run,
        step=step,
        attempt=1,
        rank=rank,
        world=len(by_rank),
        data_key=keys.data_key(run, step, 1, rank) if nbytes else "",
        data_nbytes=nbytes,
        data_crc64=combine((extent.crc64, extent.nbytes) for extent in own),
        skeleton=skeleton if rank == 0 else None,
        skeleton_crc64=skeleton_crc64(skeleton),
        local_skeleton=flatten({}).skeleton,
        extents=(*own, *others),
    )
    key, packed = keys.index_key(run, step, 1, rank), index.pack()
    if not store.put_if_absent(key, packed) and store.get(key) != packed:
        raise ObjectConflict(f"{key}: has other content; was another checkpoint migrated there?")
    return UploadRecord(rank=rank, index_key=key, index_crc64=crc64_of(packed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpointing.dcp.migrate",
        description="Take a checkpoint of torch.distributed.checkpoint over into a run.",
    )
    parser.add_argument("source", help="folder with .metadata and *.distcp, or an everstep url")
    parser.add_argument("--store", required=True, help="s3://bucket/prefix or file:///folder")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--step", type=int, help="finished steps; else from the source's name")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="consent to unpickle the source's .metadata, which can run any code",
    )
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="KEY", help="skip keys that begin so"
    )
    parser.add_argument("--endpoint-url", help="S3 endpoint")
    parser.add_argument("--region", help="S3 region")
    return parser


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    sys.exit(main())
