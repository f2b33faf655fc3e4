"""What is read back from a store is believed only after this: types, ranges, keys, depth.

Nothing here allocates more than the document that it looks at, and nothing is executed. A later
reader can then trust every number to be one, and every key to lie where it belongs.
"""

import binascii
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from checkpointing import dtypes
from checkpointing import leaves as leaf_bytes
from checkpointing.errors import ManifestInvalid, StoreError
from checkpointing.plan import Extent
from checkpointing.store.base import check_key
from checkpointing.tree import LEAVES, Node

_MOST: Final = 1 << 62
_DEEPEST: Final = 320
_MOST_DIMS: Final = 64
_HEX: Final = re.compile(r"-?0x[0-9a-f]+")
_PLAIN: Final = frozenset({"name", "kind", "owner", "dtype", "shape", "offset", "nbytes", "crc64"})
_SHARD: Final = _PLAIN | {"whole", "start", "blocks"}
_BRANCHES: Final = ("dict", "list", "tuple")


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


def number(value: object, what: str, *, least: int = 0, most: int = _MOST) -> int:
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
    if owner < -1 or offset < -1 or not 0 <= nbytes < _MOST or not 0 <= sum_ < 1 << 64:
        refuse(f"{name!r:.80}: owner, offset, nbytes or crc64 out of range", raw)
    if offset >= _MOST or owner >= _MOST:
        refuse(f"{name!r:.80}: owner or offset out of range", raw)
    held = _sizes(shape, name)
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


def _sizes(shape: object, name: str) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > _MOST_DIMS:
        refuse(f"{name!r:.80}: shape", shape)
    for size in shape:
        if type(size) is not int or not 0 <= size < _MOST:
            refuse(f"{name!r:.80}: shape", shape)
    return tuple(shape)


def _piece(
    raw: Mapping[str, Any], name: str, shape: tuple[int, ...], nbytes: int
) -> dict[str, tuple[int, ...]]:
    whole, start = _sizes(raw["whole"], name), _sizes(raw["start"], name)
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


def skeleton(node: Node, what: str) -> dict[str, str]:
    """Check a skeleton, not by recursion; return the kinds of its leaves by name."""
    found: dict[str, str] = {}
    stack = [(node, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > _DEEPEST:
            refuse(f"{what} is nested more than {_DEEPEST} deep")
        kind = type(value)
        if value is None or kind in (bool, str, int):
            continue
        if kind is float:
            if not math.isfinite(value):
                refuse(f"{what} has a number that is none", value)
            continue
        if kind is not dict or type(value.get("t")) is not str:
            refuse(f"{what} has a value of no known kind", value)
        tag = value["t"]
        if tag in LEAVES:
            name = _leaf(value, what)
            if name in found:
                refuse(f"{what} names a tensor twice", name)
            found[name] = tag
        elif tag in _BRANCHES:
            stack += [(child, depth + 1) for child in _children(value, tag, what)]
        elif tag == "object":
            exactly(value, frozenset("tv"), what)
            stack.append((value["v"], depth + 1))
        else:
            _scalar(value, tag, what)
    return found


def state_skeleton(node: Node, what: str) -> dict[str, str]:
    """Check the skeleton of a state, which is a mapping at the top."""
    if type(node) is not dict or node.get("t") != "dict":
        refuse(f"{what} is no mapping", node)
    return skeleton(node, what)


def _leaf(value: dict[str, Any], what: str) -> str:
    exactly(value, frozenset("tn"), what)
    if type(value["n"]) is not str:
        refuse(f"{what} has a tensor without a name", value)
    return str(value["n"])


def _children(value: dict[str, Any], tag: str, what: str) -> list[Any]:
    exactly(value, frozenset("tkv") if tag == "dict" else frozenset("tv"), what)
    children = items(value["v"], what)
    if tag == "dict":
        names = items(value["k"], what)
        if any(type(name) not in (str, int) for name in names):
            refuse(f"{what} has a key that is neither a string nor a whole number", names)
        if not len(set(names)) == len(names) == len(children):
            refuse(f"{what} has a mapping whose keys and values do not pair", names)
    return children


def _scalar(value: dict[str, Any], tag: str, what: str) -> None:
    exactly(value, frozenset("tv"), what)
    held = value["v"]
    if type(held) is not str:
        refuse(f"{what} has a value that is no string", value)
    if tag == "int" and _HEX.fullmatch(held):
        return
    if tag == "float" and held in ("inf", "-inf", "nan"):
        return
    if tag == "bytes":
        try:
            binascii.a2b_base64(held, strict_mode=True)
        except ValueError:
            refuse(f"{what} has bytes that are no base64", held)
        return
    refuse(f"{what} has a value of no known kind", value)


def _no_constant(name: str) -> NoReturn:
    refuse("a number that is none", name)
