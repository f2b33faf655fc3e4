"""Turns what was read into the fields of an index or a manifest, or refuses it in one line."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from checkpointing import checked, keys
from checkpointing.plan import Extent

_COMMON: Final = frozenset({"run", "step", "attempt", "world", "skeleton"})
_DATA: Final = frozenset({"data_key", "data_nbytes", "data_crc64"})
_SHARD: Final = _DATA | {"rank", "index_key", "index_crc64"}
_INDEX: Final = _COMMON | _DATA | {"rank", "skeleton_crc64", "local_skeleton", "extents"}
_MANIFEST: Final = _COMMON | {"write_id", "nbytes", "shards", "tensors"}
_MOST_STEPS: Final = 10**18 - 1  # as many digits as `keys` reads
_MOST_ATTEMPTS: Final = 10**9 - 1
_MOST_RANKS: Final = 1 << 20


def index(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an index, all of them checked."""
    checked.exactly(found, _INDEX, "the index")
    run, step, attempt, world = _place(found)
    rank = checked.number(found["rank"], "rank", most=world - 1)
    extents = tuple(map(checked.extent, checked.items(found["extents"], "extents")))
    if len({(extent.kind == "local", extent.name) for extent in extents}) != len(extents):
        checked.refuse("two extents of one name")
    data_key, data_nbytes = _data(found, keys.data_prefix(run, step, attempt))
    for extent in extents:
        end = extent.offset + extent.nbytes if extent.offset >= 0 else 0
        if extent.owner >= world or end > data_nbytes:
            checked.refuse(f"{extent.name!r:.80}: beyond the object of rank {rank}")
    for name in ("skeleton", "local_skeleton"):
        if found[name] is not None:
            checked.state_skeleton(found[name], name)
    return {
        "run": run,
        "step": step,
        "attempt": attempt,
        "rank": rank,
        "world": world,
        "data_key": data_key,
        "data_nbytes": data_nbytes,
        "data_crc64": checked.crc(found["data_crc64"], "data_crc64"),
        "skeleton": found["skeleton"],
        "skeleton_crc64": checked.crc(found["skeleton_crc64"], "skeleton_crc64"),
        "local_skeleton": found["local_skeleton"],
        "extents": extents,
    }


def manifest(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest, all of them checked, its shards as dicts."""
    average_of, tokens = found.pop("average_of", []), found.pop("tokens", None)
    checked.exactly(found, _MANIFEST, "the manifest")
    run, step, attempt, world = _place(found)
    prefix = keys.data_prefix(run, step, attempt)
    listed = checked.items(found["shards"], "shards")
    if len(listed) != world:
        checked.refuse(f"{len(listed)} shards of {world} ranks")
    shards = tuple(_shard(rank, raw, prefix) for rank, raw in enumerate(listed))
    sizes = [shard["data_nbytes"] for shard in shards]
    nbytes = sum(sizes)
    if nbytes != checked.number(found["nbytes"], "nbytes"):
        checked.refuse(f"nbytes, of objects with {nbytes}", found["nbytes"])
    tensors = tuple(map(checked.extent, checked.items(found["tensors"], "tensors")))
    _whole(tensors, sizes, checked.state_skeleton(found["skeleton"], "skeleton"))
    return {
        "run": run,
        "step": step,
        "attempt": attempt,
        "world": world,
        "write_id": checked.text(found["write_id"], "write_id"),
        "nbytes": nbytes,
        "shards": shards,
        "skeleton": found["skeleton"],
        "tensors": tensors,
        "average_of": tuple(map(_of, checked.items(average_of, "average_of"))),
        "tokens": None if tokens is None else checked.number(tokens, "tokens"),
    }


def _place(found: Mapping[str, Any]) -> tuple[str, int, int, int]:
    return (
        checked.run_name(found["run"]),
        checked.number(found["step"], "step", most=_MOST_STEPS),
        checked.number(found["attempt"], "attempt", most=_MOST_ATTEMPTS),
        checked.number(found["world"], "world", least=1, most=_MOST_RANKS),
    )


def _data(found: Mapping[str, Any], prefix: str) -> tuple[str, int]:
    nbytes = checked.number(found["data_nbytes"], "data_nbytes")
    key = found["data_key"]
    if key != "" or nbytes:
        key = checked.key_below(key, prefix, "data_key")
    return key, nbytes


def _shard(rank: int, raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    checked.exactly(raw, _SHARD, "a shard")
    if checked.number(raw["rank"], "rank") != rank:
        checked.refuse(f"rank, of shard {rank}", raw["rank"])
    data_key, data_nbytes = _data(raw, prefix)
    return {
        "rank": rank,
        "index_key": checked.key_below(raw["index_key"], prefix, "index_key"),
        "index_crc64": checked.crc(raw["index_crc64"], "index_crc64"),
        "data_key": data_key,
        "data_nbytes": data_nbytes,
        "data_crc64": checked.crc(raw["data_crc64"], "data_crc64"),
    }


def _whole(tensors: Sequence[Extent], sizes: Sequence[int], named: Mapping[str, str]) -> None:
    """Check that extents lie in their objects and make up, by name, what the skeleton has."""
    held: dict[str, int] = {}
    first: dict[str, Extent] = {}
    for extent in tensors:
        place = extent.owner if extent.offset >= 0 else -1
        if not 0 <= place < len(sizes) or extent.kind == "local":
            checked.refuse(f"{extent.name!r:.80}: in the object of no rank")
        if extent.offset + extent.nbytes > sizes[place]:
            checked.refuse(f"{extent.name!r:.80}: beyond the object of rank {place}")
        like = first.setdefault(extent.name, extent)
        if like is not extent and (extent.kind, extent.dtype, extent.whole) != (
            "shard",
            like.dtype,
            like.whole,
        ):
            checked.refuse(f"{extent.name!r:.80}: its pieces do not fit together")
        held[extent.name] = held.get(extent.name, 0) + math.prod(extent.shape)
    if odd := first.keys() ^ named.keys():
        checked.refuse("the skeleton and the tensors have other names", sorted(odd)[:3])
    for name, elements in held.items():
        if elements != math.prod(first[name].global_shape):
            checked.refuse(f"{name!r:.80}: {elements} of its elements are there")


def _of(raw: object) -> tuple[int, int]:
    pair = checked.items(raw, "average_of")
    if len(pair) != 2:
        checked.refuse("average_of", pair)
    return checked.number(pair[0], "average_of"), checked.number(pair[1], "average_of")
