"""CRC64NVME: what S3 itself computes, at memory speed, and parts combine without reading again."""

import base64
from collections.abc import Iterable
from typing import cast

from awscrt import checksums


def crc64(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """Return the CRC of `previous`'s data followed by `data`."""
    return cast(int, checksums.crc64nvme(data, previous))


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of a concatenation from the (CRC, length) of its pieces."""
    total: int = 0
    both = checksums.combine_crc64nvme
    for crc, nbytes in parts:
        if nbytes:
            total = both(total, crc, nbytes)
    return total


def to_base64(crc: int) -> str:
    """Return the form that S3 headers carry."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def from_base64(text: str) -> int:
    """Read the form that S3 headers carry."""
    return int.from_bytes(base64.b64decode(text), "big")
