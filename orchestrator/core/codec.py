"""Events to JSON values and back, strictly: what does not fit its type is refused.

Dataclasses become objects; members of a union carry their class name under `is`. The mapping
follows the type hints, so a new event needs no code here.
"""

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any, Union, get_args, get_origin

from orchestrator.core.events import Event
from orchestrator.core.record import Record

SCHEMA = 1
TAG = "is"

_INFINITE = {"inf": float("inf"), "-inf": float("-inf")}
_INFINITE_NAMES = {value: name for name, value in _INFINITE.items()}


class CodecError(ValueError):
    """A stored value does not fit the type it claims to have."""


def encode(value: Any) -> Any:
    """Turn a dataclass tree into JSON values; every dataclass carries its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        body = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {TAG: type(value).__name__, **body}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float):
        return _encode_float(value)
    return value


def _encode_float(value: float) -> float | str | None:
    """JSON has no NaN ("not measured") and no infinity ("no limit", a diverged loss)."""
    if value != value:
        return None
    return _INFINITE_NAMES.get(value, value)


def decode_record(value: Any) -> Record:
    """Rebuild a journal record.

    Raises:
        CodecError: The value is no record of this schema; the message names the path.
    """
    return typing.cast(Record, _decode(value, Record, "record"))


def decode(value: Any, kind: Any) -> Any:
    """Rebuild a value of a dataclass or of a union of them; raises as `decode_record` does."""
    return _decode(value, kind, "message")


def decode_event(value: Any) -> Event:
    """Rebuild one event; raises CodecError as `decode_record` does."""
    return typing.cast(Event, _decode(value, Event, "event"))


def _decode(value: Any, hint: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(value, get_args(hint), path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(value, hint, path)
    if origin is tuple:
        return _decode_tuple(value, get_args(hint), path)
    if origin is dict:
        _expect(isinstance(value, dict), path, "an object")
        item_type = get_args(hint)[1]
        return {key: _decode(item, item_type, f"{path}.{key}") for key, item in value.items()}
    return _decode_scalar(value, hint, path)


def _decode_scalar(value: Any, hint: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        known = [m.value for m in hint]
        _expect(isinstance(value, str) and value in known, path, f"one of {known}")
        return hint(value)
    if hint is float:
        return _decode_float(value, path)
    _expect(type(value) is hint, path, getattr(hint, "__name__", str(hint)))
    return value


def _decode_float(value: Any, path: str) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    _expect(type(value) in (int, float), path, "float")
    try:
        return float(value)
    except OverflowError as error:
        raise CodecError(f"{path}: {error}") from error


def _decode_dataclass(value: Any, hint: type, path: str) -> Any:
    _expect(isinstance(value, dict), path, "an object")
    _expect(value.get(TAG) == hint.__name__, path, hint.__name__)
    hints = _hints(hint)
    unknown = value.keys() - hints.keys() - {TAG}
    _expect(not unknown, path, f"no unknown keys {sorted(unknown)}")
    given = {
        name: _decode(value[name], kind, f"{path}.{name}")
        for name, kind in hints.items()
        if name in value
    }
    try:
        return hint(**given)
    except TypeError as error:
        raise CodecError(f"{path}: {error}") from error


def _decode_tuple(value: Any, args: tuple[Any, ...], path: str) -> Any:
    _expect(isinstance(value, list), path, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
    _expect(len(value) == len(args), path, f"{len(args)} items")
    return tuple(
        _decode(item, kind, f"{path}[{i}]")
        for i, (item, kind) in enumerate(zip(value, args, strict=True))
    )


def _decode_union(value: Any, members: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in members:
        return None
    if isinstance(value, dict) and TAG in value:
        for member in members:
            if getattr(member, "__name__", "") == value[TAG]:
                return _decode(value, member, path)
        raise CodecError(f"{path}: unknown kind {value[TAG]!r}")
    plain = [m for m in members if m is not type(None) and not dataclasses.is_dataclass(m)]
    _expect(len(plain) == 1, path, "a tagged object")
    return _decode(value, plain[0], path)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _expect(condition: bool, path: str, what: str) -> None:
    if not condition:
        raise CodecError(f"{path}: expected {what}")
