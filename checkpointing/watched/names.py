"""Names of the objects that watched folders become, and the order of the folders themselves."""

import re
from typing import Final

from checkpointing.checksum import crc64

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_LONGEST: Final = 180
_COMMIT: Final = re.compile(r"/([^/]+)/(\d{6})\.json$")
_PART: Final = re.compile(r"/([^/]+)/(\d{6})-([0-9a-f]{16})\.json$")
_NUMBER: Final = re.compile(r"\d+")


def quoted(name: str) -> str:
    """Return a name that every store can hold; no two names become the same one."""
    if not name:
        return "="  # the node that writes for all
    raw = name.encode("utf-8", "surrogateescape")
    text = "".join(chr(byte) if byte in _PLAIN else f"={byte:02x}" for byte in raw)
    if text in (".", ".."):
        text = text.replace(".", "=2e")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}==={crc64(raw):016x}"


def root(prefix: str) -> str:
    """Return what everything begins with that is kept under a prefix."""
    return f"{prefix}/watched/"


def claim_key(prefix: str) -> str:
    """Return the key of the word on which folder this is the place of."""
    return f"{root(prefix)}folder.json"


def piece_key(prefix: str, entry: str, node: str, number: int, nbytes: int, crc: int) -> str:
    """Return the key of some bytes: named by what they are, so nothing is sent twice."""
    place = f"{root(prefix)}data/{quoted(entry)}/{quoted(node)}"
    return f"{place}/{number:07d}-{nbytes}-{crc:016x}.bin"


def parts_prefix(prefix: str, entry: str, attempt: int) -> str:
    """Return what the parts that the nodes wrote of an entry in one attempt begin with."""
    return f"{root(prefix)}parts/{quoted(entry)}/{attempt:06d}/"


def part_key(prefix: str, entry: str, attempt: int, node: str, number: int, crc: int) -> str:
    """Return the key of a node's part; a later one has a higher number."""
    place = f"{parts_prefix(prefix, entry, attempt)}{quoted(node)}"
    return f"{place}/{number:06d}-{crc:016x}.json"


def part_of_key(key: str) -> tuple[str, int, int] | None:
    """Return (quoted node, number, crc) of a part's key, None for another key."""
    match = _PART.search(key)
    return (match.group(1), int(match.group(2)), int(match.group(3), 16)) if match else None


def commits_prefix(prefix: str, entry: str | None = None) -> str:
    """Return what all commits begin with, or those of one entry."""
    return f"{root(prefix)}commits/" + (f"{quoted(entry)}/" if entry is not None else "")


def commit_key(prefix: str, entry: str, version: int) -> str:
    """Return the key whose presence is the commit; an entry that is written anew has several."""
    return f"{commits_prefix(prefix, entry)}{version:06d}.json"


def version_of_key(key: str) -> tuple[str, int] | None:
    """Return (quoted entry, version) of a commit's key, None for another key."""
    match = _COMMIT.search(key)
    return (match.group(1), int(match.group(2))) if match else None


def age(name: str) -> tuple[tuple[int, ...], str]:
    """Return what entries are sorted by, oldest first: the numbers in their names."""
    return tuple(int(digits[:18]) for digits in _NUMBER.findall(name)), name
