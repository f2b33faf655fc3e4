"""Extents as JSON: lists of names, forms and places, and columns of numbers in base64.

    names    one for each extent
    forms    [dtype, shape, bytes] of those that differ
    places   [shape of the whole, start] of the pieces that differ
    kind, form, place, owner, offset, crc64
             little-endian whole numbers of 1, 4, 4, 4, 8 and 8 bytes for each extent; -1 in `place`
             for what is no piece
    blocks   8 bytes for each block of a piece or of what is alike on all ranks, in the order of
             the extents; of pieces alone in what was written before the third format

What is read is checked by whole columns and allocates no more than the text that it comes from.
"""

import binascii
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing import checked, dtypes
from checkpointing.extents import KINDS, SHARD, Extents, Form, Place, counts_of_blocks

_TYPES: Final = {
    "kind": "<u1",
    "form": "<i4",
    "place": "<i4",
    "owner": "<i4",
    "offset": "<i8",
    "crc64": "<u8",
}
SUMS: Final = ("crc64", "blocks")
_FIELDS: Final = frozenset({"names", "forms", "places", "blocks", *_TYPES})


def to_json(extents: Extents) -> dict[str, Any]:
    """Return the stored form."""
    extents = _of_known_blocks(extents).with_own_tables()
    return {
        "names": extents.names,
        "forms": [[form.dtype, list(form.shape), form.nbytes] for form in extents.forms],
        "places": [[list(place.whole), list(place.start)] for place in extents.places],
        **{name: packed(getattr(extents, name), type_) for name, type_ in _TYPES.items()},
        "blocks": packed(extents.blocks, "<u8"),
    }


def _of_known_blocks(extents: Extents) -> Extents:
    """Return the same without sums of blocks of replicas, unless they are known of all of them."""
    counts = counts_of_blocks(extents.kind, extents.nbytes)
    if np.array_equal(counts, extents.block_counts):
        return extents
    is_kept = extents.kind == SHARD
    blocks = extents.blocks[np.repeat(is_kept, extents.block_counts)]
    return extents.with_columns(block_counts=np.where(is_kept, counts, 0), blocks=blocks)


def packed(column: Any, type_: str) -> str:
    """Return a column as text."""
    return binascii.b2a_base64(np.asarray(column, dtype=type_).tobytes(), newline=False).decode()


def length_of_sums(count: int) -> int:
    """Return how long the text of a column of sums is."""
    return -(-8 * count // 3) * 4


def from_json(found: Any, what: str) -> Extents:
    """Read the stored form.

    Raises:
        ManifestInvalid: It is none, or does not hold together.
    """
    checked.exactly(found, _FIELDS, what)
    names = checked.items(found["names"], f"names of {what}")
    if not set(map(type, names)) <= {str}:
        checked.refuse(f"{what}: a name is no string")
    columns = {
        name: _column(found[name], type_, len(names), f"{name} of {what}")
        for name, type_ in _TYPES.items()
    }
    forms = _forms(found["forms"], len(names), what)
    places = _places(found["places"], len(names), what)
    _within(columns["kind"], 0, len(KINDS) - 1, f"kind of {what}")
    _within(columns["form"], 0, len(forms) - 1, f"form of {what}")
    _within(columns["place"], -1, len(places) - 1, f"place of {what}")
    _within(columns["owner"], -1, checked.MOST_RANKS - 1, f"owner of {what}")
    _within(columns["offset"], -1, checked.MOST - 1, f"offset of {what}")
    _fit(columns, forms, places, what)
    nbytes = np.array([form.nbytes for form in forms], np.int64)[columns["form"]]
    counts, blocks = _blocks(found["blocks"], columns["kind"], nbytes, what)
    return Extents(
        names=names, block_counts=counts, blocks=blocks, forms=forms, places=places, **columns
    )


def _column(text: object, type_: str, count: int, what: str) -> NDArray[Any]:
    width = np.dtype(type_).itemsize
    if type(text) is not str or len(text) != -(-width * count // 3) * 4:
        checked.refuse(f"{what} is no column of {count} numbers")
    try:
        raw = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # also letters that are not ASCII
        checked.refuse(f"{what} is no base64")
    if len(raw) != width * count:
        checked.refuse(f"{what} is no column of {count} numbers")
    return np.frombuffer(raw, dtype=type_).astype(np.dtype(type_).newbyteorder("="), copy=False)


def _within(column: NDArray[Any], least: int, most: int, what: str) -> None:
    if column.size and (int(column.min()) < least or int(column.max()) > most):
        checked.refuse(f"{what} goes beyond {least} to {most}")


def _forms(raw: object, most: int, what: str) -> list[Form]:
    found = []
    for one in _rows(raw, 3, most, f"forms of {what}"):
        dtype, shape = one[0], checked.sizes(one[1], what)
        nbytes = checked.number(one[2], f"bytes of {what}", most=checked.MOST - 1)
        if type(dtype) is not str or not dtypes.is_name(dtype):
            checked.refuse(f"{what}: no dtype", dtype)
        if not dtypes.fits(dtype, math.prod(shape), nbytes):
            checked.refuse(f"{what}: {nbytes} bytes are not {dtype} {list(shape)!s:.80}")
        found.append(Form(dtype, shape, nbytes))
    return found


def _places(raw: object, most: int, what: str) -> list[Place]:
    return [
        Place(checked.sizes(one[0], what), checked.sizes(one[1], what))
        for one in _rows(raw, 2, most, f"places of {what}")
    ]


def _rows(raw: object, length: int, most: int, what: str) -> list[list[Any]]:
    rows = checked.items(raw, what)
    if len(rows) > most:
        checked.refuse(f"{what}: {len(rows)} for {most} tensors")
    for row in rows:
        if len(checked.items(row, what)) != length:
            checked.refuse(what, row)
    return rows


def _fit(
    columns: Mapping[str, NDArray[Any]], forms: list[Form], places: list[Place], what: str
) -> None:
    """Check that pieces, and nothing else, have a place, and lie inside of the whole."""
    kind, form, place = (columns[name] for name in ("kind", "form", "place"))
    if np.any((kind == SHARD) != (place >= 0)):
        checked.refuse(f"{what}: a piece without a place, or a place of what is no piece")
    pairs = np.unique(
        place[kind == SHARD].astype(np.int64) * max(1, len(forms)) + form[kind == SHARD]
    )
    for pair in pairs.tolist():
        (whole, start), shape = places[pair // len(forms)], forms[pair % len(forms)].shape
        if not len(whole) == len(start) == len(shape) or any(
            at + size > end for at, size, end in zip(start, shape, whole, strict=True)
        ):
            checked.refuse(
                f"{what}: a piece of {list(shape)} at {list(start)} of {list(whole)!s:.80}"
            )


def _blocks(
    text: object, kind: NDArray[np.uint8], nbytes: NDArray[np.int64], what: str
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return how many sums of blocks each extent has, and the sums."""
    length = len(text) if type(text) is str else 0
    counts = counts_of_blocks(kind, nbytes)
    if not _is_text_of(counts, length):  # before the third format: of pieces alone
        counts = counts_of_blocks(kind, nbytes, (SHARD,))
    if not _is_text_of(counts, length):
        checked.refuse(f"{what}: too few or too many sums of blocks")
    return counts, _column(text, "<u8", int(counts.sum()), f"blocks of {what}")


def _is_text_of(counts: NDArray[np.int64], length: int) -> bool:
    """Tell whether so many sums make a text of this length."""
    if counts.size and int(counts.max()) > length:  # the sum of larger ones may not be a number
        return False
    return length_of_sums(int(counts.sum())) == length
