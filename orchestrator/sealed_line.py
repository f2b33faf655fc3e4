"""JSON objects as lines of a file, each with its own CRC-32 as the last member.

`{"is":"Record","seq":7,...,"crc":"1f2e3d4c"}`: a line that was written only in part, or changed
later, shows.
"""

import json
import zlib
from typing import Any

MARK = b',"crc":"'
TAIL = b'"}'


def seal(value: dict[str, Any]) -> bytes:
    """Return a non-empty JSON object as one line, its newline included."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + MARK + b"%08x" % zlib.crc32(body) + TAIL + b"\n"


def unseal(line: bytes) -> Any:
    """Return what was sealed.

    Raises:
        ValueError: The line is damaged.
    """
    body, mark, rest = line.rstrip(b"\n").rpartition(MARK)
    if not mark or not rest.endswith(TAIL) or len(rest) != 8 + len(TAIL):
        raise ValueError("no CRC at its end")
    if b"%08x" % zlib.crc32(body) != rest[:8]:
        raise ValueError("its CRC does not match")
    return json.loads(body + b"}")
