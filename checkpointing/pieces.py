"""Whether the pieces of sharded tensors, as their ranks tell of them, make them whole."""

from collections import defaultdict
from collections.abc import Sequence

from checkpointing.alike import agree, ranks_text
from checkpointing.boxes import Box, gap
from checkpointing.errors import CommitRefused
from checkpointing.extents import Extents

_Box = tuple[int, int]
"""Numbers of a place and a form."""


class Pieces:
    """The pieces of all tensors, from all ranks.

    Most tensors are cut as others are: each way of cutting is looked at once.

    Args:
        extents: All of them shards.
        ranks: Which rank has which.
    """

    def __init__(self, extents: Extents, ranks: Sequence[int]) -> None:
        self._extents = extents
        self._ranks = ranks
        self._form = extents.form.tolist()
        self._place = extents.place.tolist()
        self._crc64 = extents.crc64.tolist()
        self._is_uploaded = (extents.offset >= 0).tolist()
        self._has_bytes = [form.nbytes > 0 for form in extents.forms]
        self._gaps: dict[tuple[tuple[int, ...], tuple[_Box, ...]], str] = {}

    def chosen(self) -> list[int]:
        """Return the numbers of those that make up the tensors, each element once.

        Raises:
            CommitRefused: They do not, or copies of a piece differ.
        """
        by_name: dict[str, list[int]] = defaultdict(list)
        for number, name in enumerate(self._extents.names):
            by_name[name].append(number)
        return [number for name, found in by_name.items() for number in self._whole(name, found)]

    def _whole(self, name: str, found: list[int]) -> list[int]:
        forms, places = self._extents.forms, self._extents.places
        ranks = [self._ranks[n] for n in found]
        agree(name, "dtype", ranks, [forms[self._form[n]].dtype for n in found])
        agree(name, "shape of the whole", ranks, [places[self._place[n]].whole for n in found])
        by_box: dict[_Box, list[int]] = defaultdict(list)
        for number in found:
            if self._has_bytes[self._form[number]]:
                by_box[self._place[number], self._form[number]].append(number)
        chosen = [self._one(name, copies) for copies in by_box.values()]
        shape = places[self._place[found[0]]].whole
        if problem := self._gap(tuple(by_box), shape):
            raise CommitRefused(f"{name}: its pieces do not make it whole: {problem}")
        if not chosen:  # a tensor without elements has to be known all the same
            chosen = [number for number in found if self._is_uploaded[number]][:1]
        return chosen

    def _one(self, name: str, copies: list[int]) -> int:
        """Return the copy of a piece that is uploaded."""
        sums = {self._crc64[n] for n in copies}
        uploaded = [n for n in copies if self._is_uploaded[n]]
        if len(sums) == 1 and uploaded:
            # Several upload it when its mesh does not tell: that of FSDP does not know those of TP.
            return uploaded[0]
        where = f"{name} at {self._extents.places[self._place[copies[0]]].start}"
        holders = [self._ranks[n] for n in copies]
        agree(where, "content", holders, [self._crc64[n] for n in copies])
        raise CommitRefused(f"{where}: on {ranks_text(holders)}, uploaded by nobody")

    def _gap(self, boxes: tuple[_Box, ...], shape: tuple[int, ...]) -> str:
        if (shape, boxes) not in self._gaps:
            forms, places = self._extents.forms, self._extents.places
            found = [Box(places[place].start, forms[form].shape) for place, form in boxes]
            self._gaps[shape, boxes] = gap(found, shape)
        return self._gaps[shape, boxes]
