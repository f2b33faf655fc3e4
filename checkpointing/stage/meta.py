"""What describes the extents of a slot: JSON, written quickly and read whole.

What stays while the structure does is text made once; sums and Python values are filled in.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from checkpointing import checked, columns
from checkpointing.checked_skeleton import state_skeleton
from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid, ManifestInvalid
from checkpointing.extents import Extents
from checkpointing.skeletons import lengthen
from checkpointing.stage.arena import MappedArena
from checkpointing.tree import Node

_FIELDS: Final = frozenset({"skeleton", "local_skeleton", "extents", *columns.SUMS})


class Sums(NamedTuple):
    """CRC64s of all extents, and of the blocks of those that have some, one after the other."""

    extents: Sequence[int]
    blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What describes the extents of a slot.

    Attributes:
        short: Skeleton of the replicated state, in short form.
        local_short: Of this rank's own.
        extents: With offsets in the slot's extent area, and CRCs.
    """

    short: Node
    local_short: Node
    extents: Extents

    @property
    def skeleton(self) -> Node:
        """Of the replicated state."""
        return lengthen(self.short)

    @property
    def local_skeleton(self) -> Node:
        """Of this rank's own."""
        return lengthen(self.local_short)

    def pack(self) -> bytes:
        """Return the bytes that lie in the slot."""
        fixed = columns.to_json(self.extents)
        sums = {name: fixed.pop(name) for name in columns.SUMS}
        skeletons = {"skeleton": self.short, "local_skeleton": self.local_short}
        return as_json({**skeletons, "extents": fixed, **sums}).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> "Meta":
        """Read what `pack` gave.

        Raises:
            ArenaInvalid: It is nothing of the kind, or of another version.
        """
        try:
            fields = checked.document(packed)
            checked.exactly(fields, _FIELDS, "the meta of a slot")
            if type(fields["extents"]) is not dict:
                checked.refuse("the meta of a slot is of another version")
            found = {**fields["extents"], **{name: fields[name] for name in columns.SUMS}}
            extents = columns.from_json(found, "the meta of a slot")
            room = sum(map(len, extents.names))
            for name in ("skeleton", "local_skeleton"):
                state_skeleton(fields[name], name, room)
        except ManifestInvalid as error:
            raise ArenaInvalid(str(error)) from error
        return cls(short=fields["skeleton"], local_short=fields["local_skeleton"], extents=extents)

    @classmethod
    def read(cls, arena: MappedArena, index: int) -> "Meta":
        """Read a slot's meta.

        Raises:
            ArenaInvalid: It fails its CRC, or is of another version.
        """
        nbytes, crc = arena.headers[index].meta()
        start = arena.capacities.meta_at(index)
        packed = bytes(arena.view[start : start + nbytes])
        if crc64(packed) != crc:
            raise ArenaInvalid("the meta of a slot fails its CRC")
        return cls.unpack(packed)


class MetaText:
    """The same bytes from pieces made once: only sums and Python values are filled in.

    Args:
        skeleton: Literal text around the Python values of the state: one piece more than values.
        local_skeleton: The same of this rank's own state.
        extents: CRCs not filled in.
    """

    def __init__(
        self, skeleton: Sequence[str], local_skeleton: Sequence[str], extents: Extents
    ) -> None:
        fixed = columns.to_json(extents)
        for name in columns.SUMS:
            del fixed[name]
        pieces = ['{"skeleton":']
        for name, literals in (("local_skeleton", skeleton), ("extents", local_skeleton)):
            pieces[-1] += literals[0]
            pieces += literals[1:]
            pieces[-1] += f',"{name}":'
        pieces[-1] += as_json(fixed)
        self._pieces = pieces
        counts = len(extents), int(extents.block_counts.sum())
        self._longest = sum(map(len, pieces)) + sum(map(columns.length_of_sums, counts)) + 64

    def longest(self, values: Sequence[str]) -> int:
        """Return how many bytes it takes at most with these Python values."""
        return self._longest + sum(map(len, values))

    def pack(self, values: Sequence[str], sums: Sums) -> bytes:
        """Return what `Meta.pack` returns.

        Args:
            values: JSON of the Python values, of the state and then of this rank's own.
            sums: Of the extents.
        """
        text = [""] * (2 * len(values) + 1)
        text[0::2] = self._pieces
        text[1::2] = values
        for name, column in zip(columns.SUMS, sums, strict=True):
            text.append(f',"{name}":"{columns.packed(np.array(column, np.uint64), "<u8")}"')
        return "".join([*text, "}"]).encode()


def as_json(value: Any) -> str:
    """Return JSON as it lies in a slot."""
    return json.dumps(value, separators=(",", ":"))
