"""Short texts out of what processes and signals leave behind."""

from __future__ import annotations

import re
from signal import Signals

_RANK_PREFIX = re.compile(r"^\[(?:default|rank)\d+\]:\s*")


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal 77` for a number without a name."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def plain(text: str) -> str:
    """Return an error text without the rank prefix that torch puts before it."""
    return _RANK_PREFIX.sub("", text).strip()


def error_key(text: str) -> str:
    """Return an error text without what differs between ranks that meet the same error."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", plain(text))
