"""Takes a state apart again without naming anything, while its structure stays the same.

`flatten` gives every leaf its path and builds a skeleton of JSON nodes; of a state with a hundred
thousand tensors that takes seconds. A recipe is made from one such result. It then walks further
states beside the remembered structure and hands out the leaves, and JSON of the Python values,
in the same order; whatever is not exactly the same makes it give up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.sharded import Sharded, as_sharded
from checkpointing.skeletons import names_below, shorten
from checkpointing.stage.meta import as_json
from checkpointing.tree import LEAVES, Flat, Node, is_object, is_scalar, join, scalar

Walk = Callable[[Any, list[Any], list[str]], bool]
"""Adds a value's leaves and Python values to the lists; False when it is not alike."""

_FAST: Final = 1 << 53


class Recipe:
    """The structure of one flattened state, as walks over the next ones.

    Attributes:
        literals: JSON of the skeleton around the Python values: one piece more than values.
    """

    def __init__(self, flat: Flat) -> None:
        self.literals: list[str] = []
        self._parts: list[str] = []
        self._flat = flat.leaves
        self._alike: dict[Any, Walk] = {}
        node = shorten(flat.skeleton)
        self._keys = list(node["k"])
        self._literal('{"t":"dict","k":' + as_json(self._keys))
        if "l" in node:
            self._walks = self._row_of_leaves(node, "", self._top_leaf)
        else:
            self._literal(',"v":[')
            self._walks = []
            for number, (key, child) in enumerate(zip(self._keys, node["v"], strict=True)):
                self._literal("," if number else "")
                self._walks.append(self._top(child, join("", key)))
            self._literal("]}")
        self._cut()
        del self._flat  # the leaves themselves are not kept

    def take(self, state: Mapping[str, Any]) -> tuple[list[Any], list[str]] | None:
        """Return leaves and JSON of the Python values; None when the structure is another."""
        leaves: list[Any] = []
        values: list[str] = []
        if list(state) != self._keys:
            return None
        for walk, value in zip(self._walks, state.values(), strict=True):
            if not walk(value, leaves, values):
                return None
        return leaves, values

    def _literal(self, text: str) -> None:
        self._parts.append(text)

    def _cut(self) -> None:
        self.literals.append("".join(self._parts))
        self._parts.clear()

    def _top_leaf(self, name: str, kind: str) -> Walk:
        return _no_object(self._leaf(name, kind))

    def _top(self, node: Node, path: str) -> Walk:
        if not (isinstance(node, dict) and node["t"] == "object"):
            return _no_object(self._compile(node, path))
        self._literal('{"t":"object","v":')
        inner = self._compile(node["v"], path)
        self._literal("}")
        return lambda value, leaves, values: (
            is_object(value) and inner(value.state_dict(), leaves, values)
        )

    def _compile(self, node: Node, path: str) -> Walk:
        tag = node["t"] if isinstance(node, dict) else ""
        if tag in LEAVES:
            self._literal(f'{{"t":"{tag}","n":{encode_basestring_ascii(node["n"])}}}')
            return self._leaf(node["n"], tag)
        if tag == "dict":
            return self._dict(node, path)
        if tag in ("list", "tuple"):
            return self._row(node, tag, path)
        self._cut()
        return _value

    def _leaf(self, name: str, kind: str) -> Walk:
        """Return one walk for all leaves that are alike: new ones by the thousand take seconds."""
        like = self._flat[name]
        if kind == "shard":
            return _shard(like)
        device = None if isinstance(like, np.ndarray) else like.is_cpu
        key = (type(like), like.dtype, like.shape, device)
        walk = self._alike.get(key)
        if walk is None:
            walk = self._alike[key] = _leaf(like)
        return walk

    def _children(self, children: Iterable[tuple[str, Node]]) -> list[Walk]:
        self._literal(',"v":[')
        walks = []
        for number, (path, child) in enumerate(children):
            self._literal("," if number else "")
            walks.append(self._compile(child, path))
        self._literal("]}")
        return walks

    def _row_of_leaves(self, node: Node, path: str, walk: Callable[[str, str], Walk]) -> list[Walk]:
        kind = node["l"]
        self._literal(f',"l":"{kind}"}}')
        return [walk(name, kind) for name in names_below(path, node["k"])]

    def _dict(self, node: Node, path: str) -> Walk:
        keys, types = list(node["k"]), {type(key) for key in node["k"]}
        self._literal('{"t":"dict","k":' + as_json(keys))
        if "l" in node:
            walks = self._row_of_leaves(node, path, self._leaf)
        else:
            pairs = zip(keys, node["v"], strict=True)
            walks = self._children((join(path, key), child) for key, child in pairs)

        def walk(value: Any, leaves: list[Any], values: list[str]) -> bool:
            # A key True equals 1, and it is not one that can be saved.
            if not isinstance(value, dict) or list(value) != keys or set(map(type, value)) != types:
                return False
            for inner, child in zip(walks, value.values(), strict=True):
                if not inner(child, leaves, values):
                    return False
            return True

        return walk

    def _row(self, node: Node, tag: str, path: str) -> Walk:
        self._literal('{"t":"' + tag + '"')
        walks = self._children((join(path, n), child) for n, child in enumerate(node["v"]))

        def walk(value: Any, leaves: list[Any], values: list[str]) -> bool:
            exact = type(value)
            alike = exact is list if tag == "list" else exact is tuple or exact.__name__ == "Size"
            if not alike or len(value) != len(walks):
                return False
            pairs = zip(walks, value, strict=True)
            return all(inner(child, leaves, values) for inner, child in pairs)

        return walk


def values_of(node: Node) -> list[str]:
    """Return JSON of the Python values in a skeleton, in the order of `Recipe.take`."""
    tag = node["t"] if isinstance(node, dict) else ""
    if tag in LEAVES:
        return []
    if tag == "object":
        return values_of(node["v"])
    if tag in ("dict", "list", "tuple"):
        return [text for child in node["v"] for text in values_of(child)]
    return [as_json(node)]


def _no_object(walk: Walk) -> Walk:
    return lambda value, leaves, values: not is_object(value) and walk(value, leaves, values)


def _value(value: Any, _: list[Any], values: list[str]) -> bool:
    if type(value) is int and -_FAST < value < _FAST:
        values.append(str(value))
        return True
    if not is_scalar(value):
        return False
    values.append(as_json(scalar(value)))
    return True


def _leaf(like: Any) -> Walk:
    if isinstance(like, np.ndarray):
        return _array(like)
    exact, dtype, shape = type(like), like.dtype, like.shape
    is_cpu, layout = like.is_cpu, like.layout

    def walk(value: Any, leaves: list[Any], _: list[str]) -> bool:
        if (
            type(value) is exact
            and value.dtype is dtype
            and value.shape == shape
            and value.is_cpu is is_cpu
            and value.layout is layout
        ):
            leaves.append(value)
            return is_cpu or not value.is_meta
        return False

    return walk


def _array(like: Any) -> Walk:
    dtype, shape = like.dtype, like.shape

    def walk(value: Any, leaves: list[Any], _: list[str]) -> bool:
        alike = type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
        leaves.append(value)
        return alike

    return walk


def _shard(like: Any) -> Walk:
    """Compare pieces by their place; of a DTensor by what that follows from."""
    exact = type(like)
    if isinstance(like, Sharded):
        place, inner = _place(like), _leaf(like.local)

        def walk(value: Any, leaves: list[Any], values: list[str]) -> bool:
            alike = type(value) is exact and _place(value) == place
            if not alike or not inner(value.local, [], values):
                return False
            leaves.append(value)
            return True

        return walk
    mesh, placements, shape, dtype = like.device_mesh, like.placements, like.shape, like.dtype
    local = leaf_bytes.shape_of(like)

    def walk_dtensor(value: Any, leaves: list[Any], _: list[str]) -> bool:
        if type(value) is not exact or value.dtype != dtype or value.shape != shape:
            return False
        if value.device_mesh != mesh or value.placements != placements:
            return False
        leaves.append(value)
        return leaf_bytes.unsupported(value) is None and leaf_bytes.shape_of(value) == local

    return walk_dtensor


def _place(piece: Sharded) -> Sequence[Any]:
    found = as_sharded(piece)
    return found.shape, found.start, found.copy, found.copies
