"""JSON documents with a CRC of their own content: a torn or altered one is known as such."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from checkpointing import checked
from checkpointing.checksum import crc64
from checkpointing.errors import ManifestInvalid, ObjectCorrupt, RestoreFailed
from checkpointing.gzipped import deflated, inflated
from checkpointing.store.base import ObjectStore

_HEAD: Final = b'{"body":'
_TAIL: Final = b',"crc64":'
_Read = TypeVar("_Read")
_log = logging.getLogger(__name__)


def canonical(value: object) -> bytes:
    """Return the one JSON form of a value, over which sums are made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def seal(form: str, fields: Mapping[str, Any]) -> bytes:
    """Return a document with its format and its own CRC."""
    body = canonical({"format": form, **fields})
    return deflated(b"%s%s%s%d}" % (_HEAD, body, _TAIL, crc64(body)))


def unseal(packed: bytes, *forms: str) -> dict[str, Any]:
    """Read what `seal` gave, bit for bit; the CRC is checked before anything is parsed.

    Args:
        packed: What it gave.
        *forms: The formats that are read, the newest first.

    Raises:
        ManifestInvalid: Altered, of another format, or nothing of the kind.
    """
    form, packed = forms[0], inflated(packed, checked.MOST_BYTES)
    body, tail, digits = packed[len(_HEAD) :].rpartition(_TAIL)
    if not packed.startswith(_HEAD) or not tail or not digits.endswith(b"}"):
        checked.refuse(f"not a document of format {form}")
    if digits != b"%d}" % crc64(body):
        checked.refuse("fails its own CRC")
    found = dict(checked.document(body))
    if (version := found.pop("format", None)) not in forms:
        checked.refuse(f"this version reads format {form}, not", version)
    return found


def fetch(store: ObjectStore, key: str, unpack: Callable[[bytes], _Read]) -> _Read:
    """Read a document from a store; one that is refused is read again, as `twice` does.

    Raises:
        ManifestInvalid: It is refused again, or larger than any document.
        StoreError: Not readable.
    """

    def read() -> _Read:
        try:
            packed = store.get(key)
        except ObjectCorrupt as error:
            raise ManifestInvalid(str(error)) from error
        return unpack(packed)

    return twice(read, f"{key}: ")


def twice(read: Callable[[], _Read], what: str = "") -> _Read:
    """Read once more what fails its sum: it may be altered on the way and not in its place.

    What a line altered is no reason to give up a checkpoint for good.
    """
    try:
        return read()
    except (ManifestInvalid, RestoreFailed) as error:
        _log.warning("%s%s; reading it again", what, error)
    return read()


def is_same(packed: bytes, other: bytes) -> bool:
    """Tell whether two documents say the same: another machine's zlib may give other bytes."""
    try:
        return inflated(packed, checked.MOST_BYTES) == inflated(other, checked.MOST_BYTES)
    except ManifestInvalid:
        return False
