"""Turns what was read into the fields of an index or a manifest, or refuses it in one line."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing import checked, columns, keys
from checkpointing.checked_skeleton import state_skeleton
from checkpointing.extents import LOCAL, SHARD, Extents
from checkpointing.skeletons import lengthen

_COMMON: Final = frozenset({"run", "step", "attempt", "world", "skeleton"})
_DATA: Final = frozenset({"data_key", "data_nbytes", "data_crc64"})
_SHARD: Final = _DATA | {"rank", "index_key", "index_crc64"}
_INDEX: Final = _COMMON | _DATA | {"rank", "skeleton_crc64", "local_skeleton", "extents"}
_MANIFEST: Final = _COMMON | {"write_id", "nbytes", "shards", "tensors"}
_MOST_STEPS: Final = 10**18 - 1  # as many digits as `keys` reads
_MOST_ATTEMPTS: Final = 10**9 - 1


def index(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an index, all of them checked."""
    checked.exactly(found, _INDEX, "the index")
    run, step, attempt, world = _place(found)
    rank = checked.number(found["rank"], "rank", most=world - 1)
    extents = _extents(found["extents"], "extents")
    is_local = extents.kind == LOCAL
    for half in (is_local, ~is_local):
        _once([extents.names[n] for n in np.flatnonzero(half).tolist()], "extents")
    data_key, data_nbytes = _data(found, keys.data_prefix(run, step, attempt))
    ends = np.where(extents.offset >= 0, extents.offset + extents.nbytes, 0)
    _none(extents, (extents.owner >= world) | (ends > data_nbytes), f"the object of rank {rank}")
    room = sum(map(len, extents.names))
    for name in ("skeleton", "local_skeleton"):
        if found[name] is not None:
            state_skeleton(found[name], name, room)
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
        "local_skeleton": lengthen(found["local_skeleton"]),
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
    tensors = _extents(found["tensors"], "tensors")
    _in_objects(tensors, np.array(sizes, np.int64))
    room = sum(map(len, tensors.names))
    named = state_skeleton(found["skeleton"], "skeleton", room)
    if odd := set(tensors.names) ^ named.keys():
        checked.refuse("the skeleton and the tensors have other names", sorted(odd)[:3])
    _whole(tensors)
    return {
        "run": run,
        "step": step,
        "attempt": attempt,
        "world": world,
        "write_id": checked.text(found["write_id"], "write_id"),
        "nbytes": nbytes,
        "shards": shards,
        "skeleton": lengthen(found["skeleton"]),
        "tensors": tensors,
        "average_of": tuple(map(_of, checked.items(average_of, "average_of"))),
        "tokens": None if tokens is None else checked.number(tokens, "tokens"),
    }


def _place(found: Mapping[str, Any]) -> tuple[str, int, int, int]:
    return (
        checked.run_name(found["run"]),
        checked.number(found["step"], "step", most=_MOST_STEPS),
        checked.number(found["attempt"], "attempt", most=_MOST_ATTEMPTS),
        checked.number(found["world"], "world", least=1, most=checked.MOST_RANKS),
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


def _extents(raw: object, what: str) -> Extents:
    """Read columns, or the objects that the first format has instead."""
    if type(raw) is list:
        return Extents.of(map(checked.extent, raw))
    return columns.from_json(raw, what)


def _none(extents: Extents, is_wrong: NDArray[np.bool_], what: str) -> None:
    """Refuse the first extent that is wrong."""
    if is_wrong.any():
        name = extents.names[int(np.argmax(is_wrong))]
        checked.refuse(f"{name!r:.80}: not in {what}")


def _once(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        checked.refuse(f"two {what} of one name")


def _in_objects(tensors: Extents, sizes: NDArray[np.int64]) -> None:
    """Check that each extent lies in the object of its owner."""
    owner, offset = tensors.owner, tensors.offset
    is_nowhere = (tensors.kind == LOCAL) | (offset < 0) | (owner < 0) | (owner >= len(sizes))
    _none(tensors, is_nowhere, "the object of a rank")
    _none(tensors, offset + tensors.nbytes > sizes[owner], "the bytes of the object of its rank")


def _whole(tensors: Extents) -> None:
    """Check that a tensor is there once, and of one in pieces all elements."""
    is_shard = tensors.kind == SHARD
    whole = [tensors.names[n] for n in np.flatnonzero(~is_shard).tolist()]
    _once(whole, "tensors")
    volumes = [math.prod(form.shape) for form in tensors.forms]
    likes: dict[str, tuple[str, tuple[int, ...]]] = {}
    held: dict[str, int] = {}
    pieces = tensors.rows(is_shard)
    rows = zip(pieces.names, pieces.form.tolist(), pieces.place.tolist(), strict=True)
    for name, form, place in rows:
        like = tensors.forms[form].dtype, tensors.places[place].whole
        if likes.setdefault(name, like) != like:
            checked.refuse(f"{name!r:.80}: its pieces do not fit together")
        held[name] = held.get(name, 0) + volumes[form]
    if not likes.keys().isdisjoint(whole):
        checked.refuse("tensors that are whole and in pieces")
    for name, elements in held.items():
        if elements != math.prod(likes[name][1]):
            checked.refuse(f"{name!r:.80}: {elements} of its elements are there")


def _of(raw: object) -> tuple[int, int]:
    pair = checked.items(raw, "average_of")
    if len(pair) != 2:
        checked.refuse("average_of", pair)
    return checked.number(pair[0], "average_of"), checked.number(pair[1], "average_of")
