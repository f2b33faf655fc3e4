"""Python values of a state dict as JSON, and back. Nothing is ever unpickled.

`torch.distributed.checkpoint` pickles what is no tensor. Here the kinds of values that state dicts
hold are written down by name; anything else is refused with its place, before a byte is stored.
"""

import base64
import io
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from checkpointing import leaves
from checkpointing.errors import ManifestInvalid

Node = Any
"""JSON: what `json.loads` returns."""

_EXACT: Final = 1 << 53
_DEEPEST: Final = 200


def pack(value: object, name: str) -> bytes:
    """Return a value's JSON.

    Args:
        value: What a state dict holds.
        name: Its key, for the error.

    Raises:
        TypeError: A type that cannot be kept exactly.
    """
    return json.dumps(encode(value, name), separators=(",", ":")).encode()


def unpack(packed: bytes) -> Any:
    """Return what `pack` was given.

    Raises:
        ManifestInvalid: Not such JSON.
    """
    try:
        return decode(json.loads(packed))
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"no value of a checkpoint: {error}") from error


def encode(value: object, name: str, depth: int = 0) -> Node:
    """Return a value as JSON nodes; see `pack`."""
    if depth > _DEEPEST:
        raise TypeError(f"{name}: contains itself, or is nested over {_DEEPEST} deep")
    exact = type(value)
    if value is None or exact is bool or exact is str:
        return value
    if isinstance(value, int) and exact is int:
        return value if -_EXACT < value < _EXACT else {"t": "int", "v": hex(value)}
    if isinstance(value, float) and exact is float:
        return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
    if exact in _SEQUENCES:
        items = [encode(item, f"{name}[{n}]", depth + 1) for n, item in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return {"t": _SEQUENCES[exact], "v": items}
    if isinstance(value, dict) and exact in _MAPPINGS:
        return {
            "t": _MAPPINGS[exact],
            "k": [encode(key, f"a key of {name}", depth + 1) for key in value],
            "v": [encode(item, f"{name}[{key!r}]", depth + 1) for key, item in value.items()],
        }
    return _atom(value, name)


def decode(node: Node) -> Any:
    """Return the value of JSON nodes.

    Raises:
        ManifestInvalid: Not such nodes.
    """
    if node is None or type(node) in (bool, str, int, float):
        return node
    try:
        return _DECODERS[node["t"]](node)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ManifestInvalid(f"no value of a checkpoint: {error!r}") from error


def dtype_named(name: object) -> torch.dtype:
    """Return a torch dtype by its name.

    Raises:
        ManifestInvalid: There is none of that name.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ManifestInvalid(f"no dtype {name!r} in torch {torch.__version__}")
    return found


def _atom(value: object, name: str) -> Node:
    if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
        return {"t": type(value).__name__, "v": _text(value)}
    if isinstance(value, io.BytesIO) and type(value) is io.BytesIO:
        return {"t": "bytesio", "v": _text(value.getvalue()), "at": value.tell()}
    if isinstance(value, complex) and type(value) is complex:
        return {"t": "complex", "v": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.dtype):
        return {"t": "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"t": "device", "v": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"t": "number", "d": value.dtype.name, "v": _text(value.tobytes())}
    if isinstance(value, torch.Tensor | np.ndarray):
        problem = leaves.unsupported(value)
        if problem is not None:
            raise TypeError(f"{name}: {problem}")
        data = np.empty(leaves.nbytes_of(value), np.uint8)
        leaves.copy_out(value, data)
        tag = "tensor" if isinstance(value, torch.Tensor) else "ndarray"
        shape = list(leaves.shape_of(value))
        return {"t": tag, "d": leaves.dtype_of(value), "s": shape, "v": _text(data.tobytes())}
    raise TypeError(
        f"{name}: {type(value).__module__}.{type(value).__qualname__} would have to be pickled; "
        "give tensors, arrays, numbers, strings, bytes, BytesIO, None, lists, tuples, sets or dicts"
    )


def _text(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _raw(node: Node) -> bytes:
    return base64.b64decode(node["v"], validate=True)


def _items(node: Node) -> list[Any]:
    if not isinstance(node["v"], list):
        raise ValueError(f"{node['t']} without a list")
    return [decode(item) for item in node["v"]]


def _pairs(node: Node) -> list[tuple[Any, Any]]:
    return list(zip([decode(key) for key in node["k"]], _items(node), strict=True))


def _bytesio(node: Node) -> io.BytesIO:
    stream = io.BytesIO(_raw(node))
    stream.seek(int(node["at"]))
    return stream


def _ndarray(node: Node) -> Any:
    return np.frombuffer(_raw(node), _numeric(node["d"])).reshape(node["s"]).copy()


def _number(node: Node) -> Any:
    (found,) = np.frombuffer(_raw(node), _numeric(node["d"]))
    return found


def _numeric(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or not name.isalnum():
        raise ValueError(f"array of dtype {name!r}")
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"array of dtype {dtype}")
    return dtype


def _tensor(node: Node) -> torch.Tensor:
    raw, dtype = bytearray(_raw(node)), dtype_named(node["d"])
    if not raw:
        shape = [int(size) for size in node["s"]]
        if math.prod(shape):
            raise ValueError("a tensor without its bytes")
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(node["s"])


def _device(node: Node) -> torch.device:
    try:
        return torch.device(node["v"])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


_SEQUENCES: Final[dict[type, str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered"}
_DECODERS: Final[dict[str, Callable[[Node], Any]]] = {
    "int": lambda node: int(node["v"], 16),
    "float": lambda node: float(node["v"]),
    "complex": lambda node: complex(*(float.fromhex(part) for part in node["v"])),
    "list": _items,
    "tuple": lambda node: tuple(_items(node)),
    "set": lambda node: set(_items(node)),
    "frozenset": lambda node: frozenset(_items(node)),
    "size": lambda node: torch.Size(_items(node)),
    "dict": lambda node: dict(_pairs(node)),
    "ordered": lambda node: OrderedDict(_pairs(node)),
    "bytes": _raw,
    "bytearray": lambda node: bytearray(_raw(node)),
    "bytesio": _bytesio,
    "dtype": lambda node: dtype_named(node["v"]),
    "device": _device,
    "number": _number,
    "tensor": _tensor,
    "ndarray": _ndarray,
}
