"""JSON documents with a CRC of their own content: a torn or altered one is known as such."""

import json
from collections.abc import Mapping
from typing import Any, Final

from checkpointing import checked
from checkpointing.checksum import crc64

_HEAD: Final = b'{"body":'
_TAIL: Final = b',"crc64":'


def canonical(value: object) -> bytes:
    """Return the one JSON form of a value, over which sums are made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def seal(form: str, fields: Mapping[str, Any]) -> bytes:
    """Return a document with its format and its own CRC."""
    body = canonical({"format": form, **fields})
    return b"%s%s%s%d}" % (_HEAD, body, _TAIL, crc64(body))


def unseal(form: str, packed: bytes) -> dict[str, Any]:
    """Read what `seal` gave, bit for bit; the CRC is checked before anything is parsed.

    Raises:
        ManifestInvalid: Altered, of another format, or nothing of the kind.
    """
    if len(packed) > checked.MOST_BYTES:
        checked.refuse(f"a document of {len(packed)} bytes")
    body, tail, digits = packed[len(_HEAD) :].rpartition(_TAIL)
    if not packed.startswith(_HEAD) or not tail or not digits.endswith(b"}"):
        checked.refuse(f"not a document of format {form}")
    if digits != b"%d}" % crc64(body):
        checked.refuse("fails its own CRC")
    found = dict(checked.document(body))
    if (version := found.pop("format", None)) != form:
        checked.refuse(f"this version reads format {form}, not", version)
    return found
