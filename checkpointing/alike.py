"""Whether the ranks of a checkpoint say the same of what is alike on all of them.

Whole columns are compared; only where they differ is looked for the tensor and the ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from checkpointing.errors import CommitRefused
from checkpointing.extents import REPLICA, Extent, Extents, shared
from checkpointing.manifest import Index


def replicas(indexes: Sequence[Index]) -> Extents:
    """Check that all ranks staged the same state and one uploads each tensor; return those.

    Raises:
        CommitRefused: They do not; it names the tensor and the ranks.
    """
    crcs = {index.skeleton_crc64 for index in indexes}
    if len(crcs) > 1:
        ranks = [i.rank for i in indexes if i.skeleton_crc64 != indexes[0].skeleton_crc64]
        raise CommitRefused(
            f"structure or Python values of the replicated state differ between rank 0 and "
            f"{ranks_text(ranks)}"
        )
    columns = [Extents.of(index.extents) for index in indexes]
    copies = shared([found.rows(found.kind == REPLICA) for found in columns])
    first = copies[0]
    lines = {name: n for n, name in enumerate(first.names)}
    offset = np.full(len(first), -1, np.int64)
    for index, own in zip(indexes, copies, strict=True):
        line = np.arange(len(first))
        if own.names != first.names:
            line = np.array([lines.get(name, -1) for name in own.names], np.intp)
        if not _are_copies(first, own, line, index.rank):
            _differ(indexes)
        is_mine = own.offset >= 0
        offset[line[is_mine]] = own.offset[is_mine]
    if (offset < 0).any():
        _differ(indexes)
    return first.with_columns(offset=offset)


def _are_copies(first: Extents, own: Extents, line: NDArray[np.intp], rank: int) -> bool:
    """Tell whether a rank has what rank 0 has, and uploads what it owns and nothing else.

    Args:
        first: Of rank 0.
        own: Of this rank, with the same tables.
        line: Number in `first` of each in `own`, -1 for none.
        rank: This rank.
    """
    if len(line) != len(first) or (np.sort(line) != np.arange(len(first))).any():
        return False
    for name in ("owner", "form", "crc64", "block_counts"):
        if (getattr(first, name)[line] != getattr(own, name)).any():
            return False
    if own.blocks.size and (own.rows(np.argsort(line)).blocks != first.blocks).any():
        return False
    return bool(((own.offset >= 0) == (own.owner == rank)).all())


def _differ(indexes: Sequence[Index]) -> NoReturn:
    """Say of the first tensor that is not alike on all ranks how it differs."""
    by_name: dict[str, list[tuple[int, Extent]]] = defaultdict(list)
    for index in indexes:
        for extent in index.extents:
            if extent.kind == "replica":
                by_name[extent.name].append((index.rank, extent))
    for name, copies in by_name.items():
        _replica(name, copies, len(indexes))
    raise CommitRefused("the replicated state is not alike on all ranks")


def _replica(name: str, copies: list[tuple[int, Extent]], world: int) -> None:
    ranks = [rank for rank, _ in copies]
    if sorted(ranks) != list(range(world)):
        absent = sorted(set(range(world)) - set(ranks))
        raise CommitRefused(
            f"{name}: not exactly once on every rank (absent: {ranks_text(absent)})"
        )
    for what, values in (
        ("owner", [extent.owner for _, extent in copies]),
        ("dtype", [extent.dtype for _, extent in copies]),
        ("shape", [extent.shape for _, extent in copies]),
        ("content", [(extent.crc64, extent.blocks) for _, extent in copies]),
    ):
        agree(name, what, ranks, values)
    uploaded = [rank for rank, extent in copies if extent.offset >= 0]
    if uploaded != [copies[0][1].owner]:
        raise CommitRefused(f"{name}: uploaded by {ranks_text(uploaded)}, not by its owner alone")


def agree(name: str, what: str, ranks: Sequence[int], values: Sequence[object]) -> None:
    """Check that ranks say the same.

    Raises:
        CommitRefused: They do not; it names the sides.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        groups[value].append(rank)
    if len(groups) > 1:
        sides = sorted(groups.values(), key=len, reverse=True)
        raise CommitRefused(f"{name}: {what} differs: {' against '.join(map(ranks_text, sides))}")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a person."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "no rank"
