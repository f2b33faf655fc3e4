"""What describes the extents of a slot: JSON, written quickly and read whole."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from checkpointing import leaves as leaf_bytes
from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid
from checkpointing.plan import Extent
from checkpointing.stage.arena import MappedArena
from checkpointing.tree import Node

_CRC_DIGITS: Final = 20

Sum = tuple[int, tuple[int, ...]]
"""CRC64 of an extent, and of each of its blocks where those are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What describes the extents of a slot.

    Attributes:
        skeleton: Of the replicated state.
        local_skeleton: Of this rank's own.
        extents: With offsets in the slot's extent area, and CRCs.
    """

    skeleton: Node
    local_skeleton: Node
    extents: tuple[Extent, ...]

    def pack(self) -> bytes:
        """Return the bytes that lie in the slot."""
        fields = {
            "skeleton": self.skeleton,
            "local_skeleton": self.local_skeleton,
            "extents": [extent.to_json() for extent in self.extents],
        }
        return as_json(fields).encode()

    @classmethod
    def read(cls, arena: MappedArena, index: int) -> "Meta":
        """Read a slot's meta.

        Raises:
            ArenaInvalid: It fails its CRC.
        """
        nbytes, crc = arena.headers[index].meta()
        start = arena.capacities.meta_at(index)
        packed = bytes(arena.view[start : start + nbytes])
        if crc64(packed) != crc:
            raise ArenaInvalid("the meta of a slot fails its CRC")
        return cls.unpack(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> "Meta":
        """Read what `pack` gave; anything else raises a TypeError, KeyError or ValueError."""
        fields = json.loads(packed)
        return cls(
            skeleton=fields["skeleton"],
            local_skeleton=fields["local_skeleton"],
            extents=tuple(Extent.from_json(extent) for extent in fields["extents"]),
        )


class MetaText:
    """The same bytes from pieces made once: only CRCs and Python values are filled in.

    Args:
        skeleton: Literal text around the Python values of the state: one piece more than values.
        local_skeleton: The same of this rank's own state.
        extents: CRCs not filled in.
    """

    def __init__(
        self, skeleton: Sequence[str], local_skeleton: Sequence[str], extents: Sequence[Extent]
    ) -> None:
        pieces = ['{"skeleton":']
        for name, literals in (("local_skeleton", skeleton), ("extents", local_skeleton)):
            pieces[-1] += literals[0]
            pieces += literals[1:]
            pieces[-1] += f',"{name}":'
        pieces[-1] += "["
        self._digits = 0
        self._is_shard = [extent.kind == "shard" for extent in extents]
        self._has_shards = any(self._is_shard)
        for number, extent in enumerate(extents):
            head, *more = _around(extent)
            pieces[-1] += f",{head}" if number else head
            pieces += more
            self._digits += _CRC_DIGITS + (_CRC_DIGITS + 1) * block_count(extent)
        pieces[-1] += "]}"
        self._pieces = pieces
        self._literal = sum(map(len, pieces))

    def longest(self, values: Sequence[str]) -> int:
        """Return how many bytes it takes at most with these Python values."""
        return self._literal + self._digits + sum(map(len, values))

    def pack(self, values: Sequence[str], sums: Sequence[Sum]) -> bytes:
        """Return what `Meta.pack` returns.

        Args:
            values: JSON of the Python values, of the state and then of this rank's own.
            sums: One for each extent.
        """
        filled = list(values)
        if self._has_shards:
            for is_shard, (crc, blocks) in zip(self._is_shard, sums, strict=True):
                filled.append(str(crc))
                if is_shard:
                    filled.append(",".join(map(str, blocks)))
        else:
            filled += [str(crc) for crc, _ in sums]
        text = [""] * (2 * len(filled) + 1)
        text[0::2] = self._pieces
        text[1::2] = filled
        return "".join(text).encode()


def block_count(extent: Extent) -> int:
    """Return how many block CRCs an extent has."""
    is_large = extent.kind == "shard" and extent.nbytes > leaf_bytes.BLOCK
    return -(-extent.nbytes // leaf_bytes.BLOCK) if is_large else 0


def _around(extent: Extent) -> list[str]:
    """Return the JSON of an extent in pieces, without its CRC and the CRCs of its blocks."""
    fields = extent.to_json()
    crc, blocks = fields["crc64"], fields.pop("blocks", None)
    head, tail = as_json(fields).split(f'"crc64":{crc}', 1)
    if blocks is None:
        return [f'{head}"crc64":', tail]
    return [f'{head}"crc64":', f'{tail[:-1]},"blocks":[', "]}"]


def as_json(value: Any) -> str:
    """Return JSON as it lies in a slot."""
    return json.dumps(value, separators=(",", ":"))
