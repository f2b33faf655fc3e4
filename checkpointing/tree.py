"""A training state as a JSON skeleton and named leaves, and back.

Leaves are tensors, arrays, and pieces of tensors that no rank has whole. Everything else is in the
skeleton: JSON has no tuples, bytes, whole numbers of any size or non-finite floats, so those are
objects with a tag `t`.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.sharded import is_sharded

Node = Any
"""JSON: what `json.loads` returns."""

LEAVES: Final = ("tensor", "ndarray", "shard")
_EXACT: Final = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A flattened state.

    Attributes:
        skeleton: JSON of its structure and values, leaves by name.
        leaves: The tensors and arrays themselves, not copied.
    """

    skeleton: Node
    leaves: dict[str, Any]


def flatten(state: Mapping[str, Any]) -> Flat:
    """Take a state apart; objects at its top level give their `state_dict()`.

    Raises:
        TypeError: A value that cannot be kept exactly, with its path.
    """
    leaves: dict[str, Any] = {}
    keys, values = [], []
    for key, value in state.items():
        _check_key(key, "the state")
        path = join("", key)
        keys.append(key)
        if is_object(value):
            values.append({"t": "object", "v": _encode(value.state_dict(), path, leaves)})
        else:
            values.append(_encode(value, path, leaves))
    return Flat(skeleton={"t": "dict", "k": keys, "v": values}, leaves=leaves)


def unflatten(skeleton: Node, leaves: Mapping[str, Any]) -> Any:
    """Build a new state from a skeleton; objects come back as the dict they gave."""
    if not isinstance(skeleton, dict):
        return skeleton
    tag = skeleton["t"]
    if tag in LEAVES:
        return leaves[skeleton["n"]]
    if tag == "object":
        return unflatten(skeleton["v"], leaves)
    if tag in _SCALARS:
        return _SCALARS[tag](skeleton["v"])
    items = [unflatten(child, leaves) for child in skeleton["v"]]
    if tag == "dict":
        return dict(zip(skeleton["k"], items, strict=True))
    return items if tag == "list" else tuple(items)


def put_back(state: Mapping[str, Any], skeleton: Node, leaves: Mapping[str, Any]) -> None:
    """Bring a live state to what the skeleton says; `leaves` already hold the saved bytes.

    Objects get `load_state_dict`, dicts and lists are changed in place.

    Raises:
        KeyError: The state has keys that were not saved, or the other way round at the top level,
            or has a plain value where an object was saved, or the other way round.
    """
    saved = dict(zip(skeleton["k"], skeleton["v"], strict=True))
    if saved.keys() != state.keys():
        odd = ", ".join(sorted(str(key) for key in saved.keys() ^ state.keys()))
        raise KeyError(f"only in the checkpoint or only in the state: {odd}")
    for key, node in saved.items():
        target = state[key]
        was_object = isinstance(node, dict) and node["t"] == "object"
        if was_object != is_object(target):
            was, now = ("an object", "a value") if was_object else ("a value", "an object")
            raise KeyError(f"{key}: saved from {was}, the state has {now}")
        if was_object:
            target.load_state_dict(unflatten(node, leaves))
            continue
        value = _merge(target, node, leaves, join("", key))
        if value is not target:
            if not isinstance(state, dict):
                raise KeyError(f"{key}: the state is a read-only mapping and this is a plain value")
            state[key] = value


def named_leaves(skeleton: Node) -> Iterator[tuple[str, str]]:
    """Yield (name, kind) of every leaf, kind being one of `LEAVES`."""
    if not isinstance(skeleton, dict):
        return
    if skeleton["t"] in LEAVES:
        yield skeleton["n"], skeleton["t"]
    elif skeleton["t"] == "object":
        yield from named_leaves(skeleton["v"])
    elif skeleton["t"] in ("dict", "list", "tuple"):
        for child in skeleton["v"]:
            yield from named_leaves(child)


def _merge(target: Any, node: Node, leaves: Mapping[str, Any], path: str) -> Any:
    """Return the saved value, as `target` itself wherever that can be changed in place."""
    tag = node["t"] if isinstance(node, dict) else ""
    if tag == "dict" and isinstance(target, dict):
        extra = target.keys() - set(node["k"])
        if extra:
            raise KeyError(f"{path}: not in the checkpoint: {', '.join(map(str, extra))}")
        for key, child in zip(node["k"], node["v"], strict=True):
            target[key] = _merge(target.get(key), child, leaves, join(path, key))
        return target
    if tag == "list" and isinstance(target, list):
        olds = target + [None] * (len(node["v"]) - len(target))
        pairs = enumerate(zip(olds, node["v"], strict=False))
        target[:] = [_merge(old, new, leaves, join(path, i)) for i, (old, new) in pairs]
        return target
    return unflatten(node, leaves)


def is_scalar(value: object) -> bool:
    """Tell a Python value that a skeleton holds itself."""
    return type(value) in _SCALAR_TYPES


def is_object(value: object) -> bool:
    """Tell what gives and takes a state of its own."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def scalar(value: Any) -> Node:
    """Return the node of a Python value that `is_scalar`."""
    exact = type(value)
    if exact is int:
        return value if -_EXACT < value < _EXACT else {"t": "int", "v": hex(value)}
    if exact is float:
        return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
    if exact is bytes:
        return {"t": "bytes", "v": base64.b64encode(value).decode()}
    return value


def _encode(value: Any, path: str, leaves: dict[str, Any]) -> Node:
    exact = type(value)
    if exact in _SCALAR_TYPES:
        return scalar(value)
    if kind := leaf_bytes.plain_kind(value):  # looked at early: there may be very many
        return _leaf(value, path, kind, leaves)
    if isinstance(value, dict):
        return _encode_dict(value, path, leaves)
    if exact is list or exact is tuple or exact.__name__ == "Size":
        tag = "list" if exact is list else "tuple"
        children = [_encode(child, join(path, i), leaves) for i, child in enumerate(value)]
        return {"t": tag, "v": children}
    sharded = is_sharded(value)
    tensor = leaf_bytes.is_tensor(value)
    if sharded or tensor or exact is np.ndarray:
        problem = leaf_bytes.unsupported(value)
        if problem is not None:
            raise TypeError(f"{path}: {problem}")
        tag = "shard" if sharded else "tensor" if tensor else "ndarray"
        return _leaf(value, path, tag, leaves)
    raise TypeError(
        f"{path}: {exact.__module__}.{exact.__qualname__} cannot be saved; give tensors, arrays, "
        "numbers, strings, bytes, None, dicts, lists, tuples, or at the top level an object with "
        "state_dict() and load_state_dict()"
    )


def _leaf(value: Any, path: str, tag: str, leaves: dict[str, Any]) -> Node:
    if path in leaves:
        raise TypeError(f"{path}: two keys of one dict have the same name")
    leaves[path] = value
    return {"t": tag, "n": path}


def _encode_dict(value: dict[Any, Any], path: str, leaves: dict[str, Any]) -> Node:
    keys, values = [], []
    for key, child in value.items():
        _check_key(key, path)
        keys.append(key)
        values.append(_encode(child, join(path, key), leaves))
    return {"t": "dict", "k": keys, "v": values}


def _check_key(key: object, path: str) -> None:
    if type(key) is str or (type(key) is int and -_EXACT < key < _EXACT):
        return
    raise TypeError(f"{path}: the key {key!r} is neither a string nor a small whole number")


def join(path: str, key: object) -> str:
    """Return the path of a child."""
    part = str(key)
    if "~" in part or "/" in part:
        part = part.replace("~", "~0").replace("/", "~1")  # as in a JSON pointer
    return f"{path}/{part}" if path else part


_SCALAR_TYPES: Final = frozenset((type(None), bool, str, int, float, bytes))
_SCALARS: Final[dict[str, Callable[[str], Any]]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": base64.b64decode,
}
