"""What is read back from a store is believed only after this: types, ranges, keys, depth.

Nothing here allocates more than the document that it looks at, and nothing is executed. A later
reader can then trust every number to be one, and every key to lie where it belongs.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from checkpointing import dtypes
from checkpointing import leaves as leaf_bytes
from checkpointing.errors import ManifestInvalid, StoreError
from checkpointing.extents import Extent
from checkpointing.store.base import MOST_BYTES as MOST_BYTES
from checkpointing.store.base import check_key

MOST: Final = 1 << 62
MOST_RANKS: Final = 1 << 20
_MOST_DIMS: Final = 64
_PLAIN: Final = frozenset({"name", "kind", "owner", "dtype", "shape", "offset", "nbytes", "crc64"})
_SHARD: Final = _PLAIN | {"whole", "start", "blocks"}


def refuse(what: str, value: object = None) -> NoReturn:
    """Say in one line what is wrong."""
    shown = "" if value is None else f": {value!r:.80}"
    raise ManifestInvalid(f"{what}{shown}")


def document(text: bytes) -> Mapping[str, Any]:
    """Parse JSON to an object, without non-finite numbers."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except ManifestInvalid:
        raise
    except RecursionError:
        refuse("nested too deeply")
    except (ValueError, MemoryError):
        refuse("not JSON")
    if type(found) is not dict:
        refuse("not a JSON object", found)
    return found


def exactly(found: Mapping[str, Any], names: frozenset[str], what: str) -> None:
    """Check that an object has these fields and no others."""
    if type(found) is not dict:
        refuse(f"{what} is no object", found)
    if odd := found.keys() ^ names:
        refuse(f"{what}: missing or unknown fields", sorted(map(str, odd)))


def number(value: object, what: str, *, least: int = 0, most: int = MOST) -> int:
    """Return a whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        refuse(f"{what} is no whole number from {least} to {most}", value)
    return value


def text(value: object, what: str, *, longest: int = 4096) -> str:
    """Return a string of bounded length."""
    if type(value) is not str or len(value) > longest:
        refuse(f"{what} is no short string", value)
    return value


def items(value: object, what: str) -> list[Any]:
    """Return a list."""
    if type(value) is not list:
        refuse(f"{what} is no list", value)
    return value


def crc(value: object, what: str) -> int:
    """Return a CRC64."""
    return number(value, what, most=(1 << 64) - 1)


def key_below(value: object, prefix: str, what: str) -> str:
    """Return a key that lies below a prefix and has no dotted or empty parts."""
    key = text(value, what)
    try:
        check_key(key)
    except StoreError:
        refuse(f"{what} is no safe key", key)
    if not key.startswith(prefix):
        refuse(f"{what} is not below {prefix}", key)
    return key


def run_name(value: object) -> str:
    """Return the name of a run, which begins every key of it."""
    return key_below(value, "", "run")


def extent(raw: Mapping[str, Any]) -> Extent:
    """Read one tensor's place. Written for speed: there may be hundreds of thousands."""
    if type(raw) is not dict or raw.keys() not in (_PLAIN, _SHARD):
        refuse("an extent with missing or unknown fields", raw)
    name, kind, dtype, shape = raw["name"], raw["kind"], raw["dtype"], raw["shape"]
    owner, offset, nbytes, sum_ = raw["owner"], raw["offset"], raw["nbytes"], raw["crc64"]
    if type(name) is not str or type(dtype) is not str or not dtypes.is_name(dtype):
        refuse("an extent without a name or of no dtype", raw)
    if not type(owner) is type(offset) is type(nbytes) is type(sum_) is int:
        refuse(f"{name:.80}: owner, offset, nbytes and crc64 are to be whole numbers", raw)
    if owner < -1 or offset < -1 or not 0 <= nbytes < MOST or not 0 <= sum_ < 1 << 64:
        refuse(f"{name!r:.80}: owner, offset, nbytes or crc64 out of range", raw)
    if offset >= MOST or owner >= MOST_RANKS:
        refuse(f"{name!r:.80}: owner or offset out of range", raw)
    held = sizes(shape, name)
    if not dtypes.fits(dtype, math.prod(held), nbytes):
        refuse(f"{name!r:.80}: {nbytes} bytes are not {dtype} {list(held)!s:.80}")
    found: dict[str, Any] = {}
    if kind == "shard" and len(raw) == len(_SHARD):
        found = _piece(raw, name, held, nbytes)
    elif kind not in ("replica", "local") or len(raw) != len(_PLAIN):
        refuse(f"{name!r:.80}: kind", kind)
    return Extent(
        name=name,
        kind=kind,
        owner=owner,
        dtype=dtype,
        shape=held,
        offset=offset,
        nbytes=nbytes,
        crc64=sum_,
        **found,
    )


def sizes(shape: object, name: str) -> tuple[int, ...]:
    """Return a shape."""
    if type(shape) is not list or len(shape) > _MOST_DIMS:
        refuse(f"{name!r:.80}: shape", shape)
    for size in shape:
        if type(size) is not int or not 0 <= size < MOST:
            refuse(f"{name!r:.80}: shape", shape)
    return tuple(shape)


def _piece(
    raw: Mapping[str, Any], name: str, shape: tuple[int, ...], nbytes: int
) -> dict[str, tuple[int, ...]]:
    whole, start = sizes(raw["whole"], name), sizes(raw["start"], name)
    if not len(whole) == len(start) == len(shape) or any(
        at + size > end for at, size, end in zip(start, shape, whole, strict=True)
    ):
        refuse(f"{name!r:.80}: a piece of {list(shape)} at {list(start)} of {list(whole)!s:.80}")
    blocks = items(raw["blocks"], f"{name!r:.80}: blocks")
    many = -(-nbytes // leaf_bytes.BLOCK)
    if len(blocks) != (many if many > 1 else 0):
        refuse(f"{name!r:.80}: {len(blocks)} sums of blocks for {nbytes} bytes")
    sums = tuple(crc(value, f"{name!r:.80}: blocks") for value in blocks)
    return {"whole": whole, "start": start, "blocks": sums}


def _no_constant(name: str) -> NoReturn:
    refuse("a number that is none", name)
