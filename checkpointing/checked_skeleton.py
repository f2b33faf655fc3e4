"""Checks of the skeletons that are read back, as `checkpointing.checked` does of the rest."""

import binascii
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from checkpointing import checked
from checkpointing.skeletons import LONGEST, names_below
from checkpointing.tree import LEAVES, Node, join

_DEEPEST: Final = 320
_HEX: Final = re.compile(r"-?0x[0-9a-f]+")
_BRANCHES: Final = ("dict", "list", "tuple")
_Path = tuple[Any, Any] | None
"""That of the parent, and the key there: joined only where it is needed."""


def skeleton(node: Node, what: str, room: int) -> dict[str, str]:
    """Check a skeleton in short or long form, not by recursion.

    Args:
        node: The skeleton.
        what: Its name in messages.
        room: How long the names of all leaves are at most together.

    Returns:
        The kinds of its leaves by name.
    """
    found: dict[str, str] = {}
    stack: list[tuple[Any, int, _Path]] = [(node, 0, None)]
    while stack:
        value, depth, path = stack.pop()
        if depth > _DEEPEST:
            checked.refuse(f"{what} is nested more than {_DEEPEST} deep")
        kind = type(value)
        if value is None or kind in (bool, str, int):
            continue
        if kind is float:
            if not math.isfinite(value):
                checked.refuse(f"{what} has a number that is none", value)
            continue
        if kind is not dict or type(value.get("t")) is not str:
            checked.refuse(f"{what} has a value of no known kind", value)
        tag = value["t"]
        if tag in LEAVES:
            _add(found, {_leaf(value, what): tag}, what)
        elif tag == "dict" and "l" in value:
            row = _row_of_leaves(value, path, what, room)
            room -= sum(map(len, row))
            _add(found, row, what)
        elif tag in _BRANCHES:
            children = _children(value, tag, what)
            stack += [(child, depth + 1, (path, key)) for key, child in children]
        elif tag == "object":
            checked.exactly(value, frozenset("tv"), what)
            stack.append((value["v"], depth + 1, path))
        else:
            _scalar(value, tag, what)
    return found


def state_skeleton(node: Node, what: str, room: int) -> dict[str, str]:
    """Check the skeleton of a state, which is a mapping at the top."""
    if type(node) is not dict or node.get("t") != "dict":
        checked.refuse(f"{what} is no mapping", node)
    return skeleton(node, what, room)


def _leaf(value: dict[str, Any], what: str) -> str:
    checked.exactly(value, frozenset("tn"), what)
    if type(value["n"]) is not str:
        checked.refuse(f"{what} has a tensor without a name", value)
    return str(value["n"])


def _add(found: dict[str, str], more: Mapping[str, str], what: str) -> None:
    before = len(found)
    found |= more
    if len(found) != before + len(more):
        checked.refuse(f"{what} names a tensor twice, one of", sorted(more)[:3])


def _row_of_leaves(value: dict[str, Any], path: _Path, what: str, room: int) -> dict[str, str]:
    checked.exactly(value, frozenset("tkl"), what)
    if value["l"] not in LEAVES:
        checked.refuse(f"{what} has a leaf of no known kind", value["l"])
    children, prefix = _keys(value, what), _joined(path, what)
    if (len(prefix) + 1) * len(children) > room + len(children):
        checked.refuse(f"{what} has other names than the tensors")
    names = names_below(prefix, children)
    found = dict.fromkeys(names, str(value["l"]))
    if len(found) != len(names):  # the keys 1 and "1"
        checked.refuse(f"{what} names a tensor twice, one of", names[:3])
    return found


def _joined(path: _Path, what: str) -> str:
    parts: list[Any] = []
    while path is not None:
        path, part = path
        parts.append(part)
    if sum(len(str(part)) for part in parts) > LONGEST:
        checked.refuse(f"{what} has a short form at a path that is long")
    return functools.reduce(join, reversed(parts), "")


def _keys(value: dict[str, Any], what: str) -> list[Any]:
    names = checked.items(value["k"], what)
    if not set(map(type, names)) <= {str, int}:
        checked.refuse(f"{what} has a key that is neither a string nor a whole number", names)
    if len(set(names)) != len(names):
        checked.refuse(f"{what} has a mapping with a key twice", names)
    return names


def _children(value: dict[str, Any], tag: str, what: str) -> Iterable[tuple[Any, Any]]:
    checked.exactly(value, frozenset("tkv") if tag == "dict" else frozenset("tv"), what)
    children = checked.items(value["v"], what)
    if tag != "dict":
        return enumerate(children)
    names = _keys(value, what)
    if len(names) != len(children):
        checked.refuse(f"{what} has a mapping whose keys and values do not pair", names)
    return zip(names, children, strict=True)


def _scalar(value: dict[str, Any], tag: str, what: str) -> None:
    checked.exactly(value, frozenset("tv"), what)
    held = value["v"]
    if type(held) is not str:
        checked.refuse(f"{what} has a value that is no string", value)
    if tag == "int" and _HEX.fullmatch(held):
        return
    if tag == "float" and held in ("inf", "-inf", "nan"):
        return
    if tag == "bytes":
        try:
            binascii.a2b_base64(held, strict_mode=True)
        except ValueError:
            checked.refuse(f"{what} has bytes that are no base64", held)
        return
    checked.refuse(f"{what} has a value of no known kind", value)
