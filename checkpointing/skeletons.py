"""The short form of skeletons, in which they are stored.

The name of a leaf is the path to it, and most leaves lie in mappings of nothing but leaves of one
kind. Those mappings have `l`, the kind, instead of `v`, the leaves:

    {"t": "dict", "k": ["a", "b"], "l": "tensor"}
"""

from collections.abc import Sequence
from typing import Any, Final

from checkpointing.tree import LEAVES, Node, join

LONGEST: Final = 1024
"""Of the path to a mapping in short form: each of its names will begin with that."""


def shorten(node: Node, path: str = "") -> Node:
    """Return the short form; of a short form the same."""
    tag = node["t"] if isinstance(node, dict) else ""
    if tag == "object":
        return {"t": tag, "v": shorten(node["v"], path)}
    if tag in ("list", "tuple"):
        children = enumerate(node["v"])
        return {"t": tag, "v": [shorten(child, join(path, n)) for n, child in children]}
    if tag != "dict" or "v" not in node:
        return node
    keys, children = node["k"], node["v"]
    kind = _common(children)
    is_short = len(path) <= LONGEST and kind != ""
    if is_short and [child["n"] for child in children] == names_below(path, keys):
        return {"t": "dict", "k": keys, "l": kind}
    pairs = zip(keys, children, strict=True)
    return {"t": "dict", "k": keys, "v": [shorten(child, join(path, key)) for key, child in pairs]}


def lengthen(node: Node, path: str = "") -> Node:
    """Return the long form; of a long form the same."""
    if not isinstance(node, dict):
        return node
    tag = node["t"]
    if tag == "object":
        return {"t": tag, "v": lengthen(node["v"], path)}
    if tag in ("list", "tuple"):
        return {"t": tag, "v": [_long(path, n, child) for n, child in enumerate(node["v"])]}
    if tag != "dict":
        return node
    keys = node["k"]
    if "l" in node:
        kind = node["l"]
        found = [{"t": kind, "n": name} for name in names_below(path, keys)]
    else:
        pairs = zip(keys, node["v"], strict=True)
        found = [_long(path, key, child) for key, child in pairs]
    return {"t": "dict", "k": keys, "v": found}


def _long(path: str, key: Any, child: Node) -> Node:
    return lengthen(child, join(path, key)) if isinstance(child, dict) else child


def names_below(path: str, keys: Sequence[Any]) -> list[str]:
    """Return the names of leaves with these keys in the mapping at a path."""
    parts = list(map(str, keys))
    together = "".join(parts)
    if "/" in together or "~" in together:
        return [join(path, part) for part in parts]
    return [f"{path}/{part}" for part in parts] if path else parts


def _common(children: Sequence[Node]) -> str:
    """Return the kind that all children are leaves of, "" for none."""
    kinds = {child.get("t") if type(child) is dict else None for child in children}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind if kind in LEAVES else ""
