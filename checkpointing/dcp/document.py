"""The document whose presence commits a save: what DCP keeps in `.metadata`, as JSON with a CRC.

Two lines: a head with the CRC64NVME of the second, and the second.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.boxes import Box, gap, whole
from checkpointing.checksum import crc64
from checkpointing.dcp import values
from checkpointing.errors import CheckpointingError, CommitRefused, ManifestInvalid
from checkpointing.leaves import BLOCK
from checkpointing.plan import Extent
from checkpointing.store.base import check_key

_FORMAT: Final = "everstep-dcp/1"
_LONGEST: Final = 1 << 20  # list of a state dict
VALUE: Final = ""
"""The dtype of a stored Python value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object in the store with what one rank wrote in one go."""

    key: str
    nbytes: int
    crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One item of a save: a piece of a tensor, or a Python value as JSON.

    Attributes:
        stored: The object that holds it.
        offset: Where it begins there.
        nbytes: Length.
        crc64: CRC64NVME of its bytes.
        dtype: Of its elements; `VALUE` for a Python value.
        shape: Of the piece; of a value its bytes.
        blocks: CRC64NVME of each `leaves.BLOCK` bytes when there is more than one.
    """

    stored: StoredObject
    offset: int
    nbytes: int
    crc64: int
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def extent(self, name: str) -> Extent:
        """Return it as `checkpointing.sources` reads it, a tensor by itself."""
        return Extent(
            name=name,
            kind="replica",
            owner=0,
            dtype=self.dtype,
            shape=self.shape,
            offset=self.offset,
            nbytes=self.nbytes,
            crc64=self.crc64,
            blocks=self.blocks,
        )


Chunks = Mapping[MetadataIndex, Chunk]


def pack(metadata: Metadata, chunks: Chunks, about: Mapping[str, Any]) -> bytes:
    """Return the document of a save.

    Args:
        metadata: As the planner made it.
        chunks: What was stored for each of its items.
        about: More to keep, for people.

    Raises:
        CommitRefused: An item was not stored, or the chunks of a tensor do not make it whole.
    """
    objects = {chunk.stored.key: chunk.stored for chunk in chunks.values()}
    place = {key: n for n, key in enumerate(objects)}
    tensors: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            tensors[name] = _tensor(name, kind, chunks, place)
        else:
            chunk = _stored(name, None, chunks)
            plain[name] = [place[chunk.stored.key], chunk.offset, chunk.nbytes, chunk.crc64]
    body = {
        **about,
        "objects": [[o.key, o.nbytes, o.crc64] for o in objects.values()],
        "tensors": tensors,
        "values": plain,
        "planner": _planner(metadata.planner_data),
    }
    packed = json.dumps(body, separators=(",", ":")).encode()
    head = json.dumps({"format": _FORMAT, "crc64": crc64(packed)}).encode()
    return head + b"\n" + packed


def unpack(packed: bytes) -> Metadata:
    """Return the DCP metadata of a document, `storage_data` being `Chunks`.

    Raises:
        ManifestInvalid: Not such a document, altered, or inconsistent.
    """
    head, _, body = packed.partition(b"\n")
    try:
        found = json.loads(head)
        if found["format"] != _FORMAT:
            raise ManifestInvalid(f"format {found['format']!r}, this version reads {_FORMAT}")
        if found["crc64"] != crc64(body):
            raise ManifestInvalid("fails its own CRC")
        return _metadata(json.loads(body))
    except ManifestInvalid:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ManifestInvalid(f"not a document of format {_FORMAT}: {error!r}") from error
    except CheckpointingError as error:  # a key that no store would take
        raise ManifestInvalid(str(error)) from error


def covers(name: str, boxes: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Say why pieces do not make a tensor whole, "" when they do."""
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return ""
    problem = gap(boxes, shape)
    return f"{name}: its pieces do not make it whole: {problem}" if problem else ""


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return DCP's chunk as a box."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _tensor(
    name: str, kind: TensorStorageMetadata, chunks: Chunks, place: Mapping[str, int]
) -> dict[str, Any]:
    shape, properties = tuple(kind.size), kind.properties
    problem = covers(name, [box_of(chunk) for chunk in kind.chunks], shape)
    if problem:
        raise CommitRefused(f"{problem}; was it saved by some of its ranks only?")
    if properties.layout is not torch.strided:
        raise CommitRefused(f"{name}: {properties.layout} tensor")
    dtype = str(properties.dtype).removeprefix("torch.")
    rows = []
    for chunk in kind.chunks:
        found = _stored(name, chunk.offsets, chunks)
        row = [list(chunk.offsets), list(chunk.sizes)]
        row += [place[found.stored.key], found.offset, found.crc64]  # type: ignore[list-item]
        more: dict[str, Any] = {"blocks": found.blocks} if found.blocks else {}
        if found.dtype != dtype:  # a planner may convert what it gives
            more["dtype"] = found.dtype
        rows.append([*row, more] if more else row)
    flags = {"grad": properties.requires_grad, "pinned": properties.pin_memory}
    return {
        "dtype": dtype,
        "shape": list(shape),
        **{flag: True for flag, is_set in flags.items() if is_set},
        "chunks": rows,
    }


def _stored(name: str, offsets: Sequence[int] | None, chunks: Chunks) -> Chunk:
    found = chunks.get(MetadataIndex(name, offsets))
    if found is None:
        where = "" if offsets is None else f" at {tuple(offsets)}"
        raise CommitRefused(f"{name}{where}: planned, and no rank stored it")
    return found


def _planner(data: Any) -> Any:
    """Return planner data: the paths of flattened keys as plain lists, else coded."""
    if isinstance(data, dict) and all(
        type(key) is str and isinstance(path, tuple) and {type(p) for p in path} <= {str, int}
        for key, path in data.items()
    ):
        return {"paths": {key: list(path) for key, path in data.items()}}
    return {"value": values.encode(data, "the planner's data")}


def _metadata(body: Mapping[str, Any]) -> Metadata:
    objects = [_object(row) for row in body["objects"]]
    chunks: dict[MetadataIndex, Chunk] = {}
    kinds: dict[str, Any] = {}
    for name, fields in body["tensors"].items():
        kinds[name] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=values.dtype_named(fields["dtype"]),
                requires_grad=fields.get("grad") is True,
                pin_memory=fields.get("pinned") is True,
            ),
            size=torch.Size(_shape(fields["shape"])),
            chunks=[],
        )
        for box, chunk in _chunks(name, fields, objects):
            offsets, sizes = torch.Size(box.start), torch.Size(box.shape)
            kinds[name].chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            chunks[MetadataIndex(name, offsets)] = chunk
    for name, (number, offset, nbytes, crc) in body["values"].items():
        kinds[name] = BytesStorageMetadata()
        stored = objects[_whole_number(number)]
        chunks[MetadataIndex(name)] = _chunk(name, stored, offset, nbytes, crc, VALUE, (nbytes,))
    return Metadata(
        state_dict_metadata=kinds,
        planner_data=_planner_data(body["planner"]),
        storage_data=chunks,
    )


def _chunks(
    name: str, fields: Mapping[str, Any], objects: Sequence[StoredObject]
) -> Iterator[tuple[Box, Chunk]]:
    shape, boxes = _shape(fields["shape"]), []
    for offsets, sizes, number, offset, crc, *more in fields["chunks"]:
        box = Box(_shape(offsets), _shape(sizes))
        options = more[0] if more else {}
        dtype = options.get("dtype", fields["dtype"])
        nbytes = box.volume * values.dtype_named(dtype).itemsize
        blocks = tuple(_whole_number(sum_) for sum_ in options.get("blocks", ()))
        if len(blocks) != (-(-nbytes // BLOCK) if nbytes > BLOCK else 0):
            raise ManifestInvalid(f"{name}: {len(blocks)} block CRCs for {nbytes} bytes")
        boxes.append(box)
        stored = objects[_whole_number(number)]
        yield box, _chunk(name, stored, offset, nbytes, crc, dtype, box.shape, blocks)
    problem = covers(name, boxes, shape)
    if problem:
        raise ManifestInvalid(problem)


def _chunk(
    name: str,
    stored: StoredObject,
    offset: int,
    nbytes: int,
    crc: int,
    dtype: str,
    shape: tuple[int, ...],
    blocks: tuple[int, ...] = (),
) -> Chunk:
    if _whole_number(offset) + _whole_number(nbytes) > stored.nbytes:
        raise ManifestInvalid(f"{name}: beyond the end of {stored.key}")
    return Chunk(
        stored=stored,
        offset=offset,
        nbytes=nbytes,
        crc64=_whole_number(crc),
        dtype=dtype,
        shape=shape,
        blocks=blocks,
    )


def _object(row: Sequence[Any]) -> StoredObject:
    key, nbytes, crc = row
    found = StoredObject(key=check_key(key), nbytes=_whole_number(nbytes), crc64=_whole_number(crc))
    if not key.startswith("data/"):
        raise ManifestInvalid(f"{key}: no object of a save")
    return found


def _planner_data(fields: Mapping[str, Any]) -> Any:
    if "paths" not in fields:
        return values.decode(fields["value"])
    for path in fields["paths"].values():
        if not path or any(type(p) is not str and not _whole_number(p) < _LONGEST for p in path):
            raise ManifestInvalid(f"{path!r}: no path into a state dict")
    return {key: tuple(path) for key, path in fields["paths"].items()}


def _shape(sizes: Any) -> tuple[int, ...]:
    found = tuple(_whole_number(size) for size in sizes)
    if math.prod(found) >= 1 << 60:
        raise ManifestInvalid(f"a tensor of {list(found)} elements")
    return found


def _whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ManifestInvalid(f"{value!r} is no whole number")
    return value
