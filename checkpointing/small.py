"""Small tensors by the hundred thousand: columns and addresses, and no object for each."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.checksum import crc64
from checkpointing.errors import CheckpointDamaged
from checkpointing.extents import Extents
from checkpointing.leaves import Bytes

LARGEST: Final = 64 << 10
_GAP: Final = 1 << 20  # cheaper to read than to skip
_LONGEST: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """Extents, and for each the memory that it shall fill.

    Attributes:
        extents: None of them empty; offsets are those in the source.
        keys: Objects that hold them, by owner.
        leaves: Whose memory it is.
        addresses: Where that begins; as many bytes as the extent has lie there in a row.
    """

    extents: Extents
    keys: Mapping[int, str]
    leaves: list[Any]
    addresses: list[int]

    def rows(self, numbers: NDArray[np.intp]) -> "Small":
        """Return some of them, in this order."""
        listed = numbers.tolist()
        return Small(
            extents=self.extents.rows(numbers),
            keys=self.keys,
            leaves=[self.leaves[n] for n in listed],
            addresses=[self.addresses[n] for n in listed],
        )


class Run:
    """Small extents that are close to each other in one object.

    Args:
        small: Ordered by their offsets.
    """

    def __init__(self, small: Small) -> None:
        extents = small.extents
        self._small = small
        self._starts: list[int] = extents.offset.tolist()
        self._ends: list[int] = (extents.offset + extents.nbytes).tolist()
        self.key = small.keys[int(extents.owner[0])]
        self.begin, self.end = self._starts[0], max(self._ends)

    def deliver(self, raw: Bytes) -> None:
        """Copy the bytes of the whole run to where they belong, each extent checked before.

        Raises:
            CheckpointDamaged: Bytes do not have their CRC.
        """
        view, base, copy = raw.data, int(raw.ctypes.data), ctypes.memmove
        small, begin = self._small, self.begin
        sums = small.extents.crc64.tolist()
        for number, start in enumerate(self._starts):
            part = view[start - begin : self._ends[number] - begin]
            if (crc := crc64(part)) != sums[number]:
                raise damaged(small.extents.names[number], self.key, crc, sums[number])
            copy(small.addresses[number], base + start - begin, part.nbytes)


def damaged(name: str, key: str, crc: int, recorded: int) -> CheckpointDamaged:
    """Return what is raised when bytes have another CRC than was recorded."""
    return CheckpointDamaged(
        f"{name}: its bytes in {key} fail their CRC ({crc:016x}, recorded {recorded:016x})"
    )


def runs(small: Small, between: Mapping[str, list[int]]) -> Iterator[Run]:
    """Group what can be read together.

    Args:
        small: In any order.
        between: By object, offsets of other things that are read: a run ends before each, so that
            it can be one request with what is around it.
    """
    owner, offset = small.extents.owner, small.extents.offset
    order = np.lexsort((offset, owner))
    owner, begin = owner[order], offset[order]
    end = begin + small.extents.nbytes[order]
    others = np.zeros(len(order), np.intp)
    for one in np.unique(owner).tolist():
        edges = np.sort(np.array(between.get(small.keys[one], ()), np.int64))
        others[owner == one] = np.searchsorted(edges, begin[owner == one])
    is_apart = (np.diff(owner) != 0) | (np.diff(others) != 0) | (begin[1:] - end[:-1] > _GAP)
    is_apart |= np.diff(begin // _LONGEST) != 0
    for numbers in np.split(order, np.flatnonzero(is_apart) + 1):
        if len(numbers):
            yield Run(small.rows(numbers))
