"""Long documents as gzip, which `zcat` reads, with a CRC64 of what follows in an extra field.

Nothing is inflated before its CRC is right, and nothing to more than it says, which is bounded.
Source of the format: RFC 1952.
"""

import struct
import zlib
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.errors import ManifestInvalid

_SHORTEST: Final = 32 << 10
_MOST_TIMES: Final = 128  # as long as what it was deflated to
_LEVEL: Final = 1
# Deflated, with an extra field: of no time, level or system, so that equal text gives equal bytes.
_MAGIC: Final = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff"
_FIELD: Final = struct.Struct("<H2sHQ")
_FIELD_NAME: Final = b"EV"
_HEAD: Final = len(_MAGIC) + _FIELD.size
_TAIL: Final = struct.Struct("<II")


def deflated(text: bytes) -> bytes:
    """Return a long text as gzip, a short one, or one that gets no shorter, as it is."""
    if len(text) < _SHORTEST:
        return text
    squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = squeeze.compress(text) + squeeze.flush()
    body += _TAIL.pack(zlib.crc32(text), len(text) & 0xFFFFFFFF)
    if not len(body) < len(text) < _MOST_TIMES * len(body):
        return text
    return _MAGIC + _FIELD.pack(_FIELD.size - 2, _FIELD_NAME, 8, crc64(body)) + body


def inflated(packed: bytes, most: int) -> bytes:
    """Return what `deflated` was given.

    Args:
        packed: What it gave.
        most: Longer texts are refused.

    Raises:
        ManifestInvalid: Altered, or longer than allowed.
    """
    if len(packed) > most:
        raise ManifestInvalid(f"a document of {len(packed)} bytes")
    if not packed.startswith(_MAGIC[:2]):
        return packed
    body = memoryview(packed)[_HEAD:]
    if len(body) < _TAIL.size:
        raise ManifestInvalid("a gzip without an end")
    field = _FIELD.pack(_FIELD.size - 2, _FIELD_NAME, 8, crc64(body))
    if packed[:_HEAD] != _MAGIC + field:
        raise ManifestInvalid("a gzip that fails its own CRC")
    crc, length = _TAIL.unpack(body[-_TAIL.size :])
    if length > min(most, _MOST_TIMES * len(body)):
        raise ManifestInvalid(f"{len(body)} bytes that are said to inflate to {length}")
    squeezed = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = squeezed.decompress(body[: -_TAIL.size], length + 1)
    except zlib.error as error:
        raise ManifestInvalid(f"a gzip that does not inflate: {error}") from error
    if not squeezed.eof or squeezed.unused_data or len(text) != length or zlib.crc32(text) != crc:
        raise ManifestInvalid("a gzip that does not inflate to what it says")
    return text
