"""Anybody's DCP checkpoint as a stream of pieces: its structure first, then batches of bytes."""

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from checkpointing.boxes import Box, whole
from checkpointing.dcp.document import box_of, covers
from checkpointing.dcp.reader import EverstepReader
from checkpointing.errors import CheckpointingError
from checkpointing.sharded import Sharded

_LONGEST: Final = 1 << 20


class MigrationRefused(CheckpointingError):
    """The checkpoint cannot be taken over as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk of a tensor in the source.

    Attributes:
        key: DCP's flat key.
        box: Its place.
        shape: Of the whole tensor.
        dtype: Of its elements.
    """

    key: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Length of its bytes."""
        return self.box.volume * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is the tensor itself."""
        return self.box == whole(self.shape)


class Source:
    """A `.distcp` folder of torch's writer, or a checkpoint of `EverstepWriter`.

    Args:
        where: Folder or URL.
        trust_pickle: The reader consents to unpickle a folder's metadata and values.
        leave_out: Beginnings of flat keys that are not wanted.

    Raises:
        MigrationRefused: No consent, or nothing there.
    """

    def __init__(self, where: str, *, trust_pickle: bool, leave_out: Sequence[str] = ()) -> None:
        folder = Path(where)
        self._foreign = "://" not in where and (folder / ".metadata").is_file()
        if self._foreign and not trust_pickle:
            raise MigrationRefused(
                f"{folder / '.metadata'} is pickle, which can run any code when it is read: add "
                "--trust-pickle if you trust where it comes from"
            )
        self._reader: StorageReader = (
            FileSystemReader(folder) if self._foreign else EverstepReader(where)
        )
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        kinds = self._metadata.state_dict_metadata
        self._keys = [key for key in kinds if not key.startswith(tuple(leave_out) or ("\0",))]

    def pieces(self) -> list[Piece]:
        """Return all chunks of tensors, in order of their keys.

        Raises:
            MigrationRefused: A tensor is not complete.
        """
        found = []
        for key in self._keys:
            kind = self._metadata.state_dict_metadata[key]
            if not isinstance(kind, TensorStorageMetadata):
                continue
            shape, boxes = tuple(kind.size), [box_of(chunk) for chunk in kind.chunks]
            problem = covers(key, boxes, shape)
            if problem:
                raise MigrationRefused(problem)
            filled = [box for box in boxes if box.volume] or boxes[:1]
            found += [
                Piece(key=key, box=box, shape=shape, dtype=kind.properties.dtype) for box in filled
            ]
        return found

    def state(self, pieces: Sequence[Piece]) -> tuple[dict[str, Any], dict[int, str]]:
        """Return the nested state with its Python values, and stand-ins where tensors belong.

        Returns:
            The state, and the flat key of each stand-in by `id`.
        """
        state: dict[str, Any] = {}
        stand_ins: dict[int, str] = {}
        is_whole = {piece.key: piece.is_whole for piece in pieces}
        plain = self._values([key for key in self._keys if key not in is_whole])
        for key in self._keys:
            path = (self._metadata.planner_data or {}).get(key, (key,))
            value = plain.get(key)
            if key in is_whole:
                empty = torch.empty(0)
                value = empty if is_whole[key] else Sharded(local=empty, shape=(0,), start=(0,))
                stand_ins[id(value)] = key
            _put(state, path, value)
        return state, stand_ins

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the bytes of some pieces as tensors."""
        rooms = [torch.empty(piece.box.shape, dtype=piece.dtype) for piece in pieces]
        items, targets = [], {}
        for piece, room in zip(pieces, rooms, strict=True):
            index = MetadataIndex(piece.key, piece.box.start)
            targets[index] = room
            zeros = torch.Size([0] * len(piece.shape))
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=index,
                    dest_offsets=zeros,
                    storage_index=index,
                    storage_offsets=zeros,
                    lengths=torch.Size(piece.box.shape),
                )
            )
        self._run(items, _Into(targets, {}))
        return rooms

    def _values(self, keys: Sequence[str]) -> dict[str, Any]:
        found: dict[str, io.BytesIO] = {}
        nothing = torch.Size([0])
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(key),
                dest_offsets=nothing,
                storage_index=MetadataIndex(key),
                storage_offsets=nothing,
                lengths=nothing,
            )
            for key in keys
        ]
        self._run(items, _Into({}, found))
        return {key: _value(stream) for key, stream in found.items()}

    def _run(self, items: Sequence[ReadItem], planner: "_Into") -> None:
        if items:
            self._reader.read_data(LoadPlan(list(items)), planner).wait()


def _value(stream: io.BytesIO) -> Any:
    try:
        value = torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        stream.seek(0)
        # Consented to; or made in this process from what is no pickle.
        value = torch.load(stream, weights_only=False)
    return value.getvalue() if isinstance(value, io.BytesIO) else value


class _Into(LoadPlanner):
    """Gives the reader room for what was asked."""

    def __init__(
        self, tensors: dict[MetadataIndex, torch.Tensor], streams: dict[str, io.BytesIO]
    ) -> None:
        self._tensors = tensors
        self._streams = streams

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def create_local_plan(self) -> LoadPlan:
        """Nothing to do."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes of a value."""
        self._streams[read_item.dest_index.fqn] = io.BytesIO(value.read())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the room for a tensor."""
        return self._tensors[read_item.dest_index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do."""


def _put(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Put a value into nested dicts and lists, made on the way; whole numbers are list places."""
    place: Any = state
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(part, int):
            if not isinstance(place, list) or not 0 <= part < _LONGEST:
                raise MigrationRefused(f"{path!r}: no path into a state dict")
            place += [None] * (part + 1 - len(place))
        elif not isinstance(place, dict):
            raise MigrationRefused(f"{path!r}: no path into a state dict")
        if following is None:
            place[part] = value
            return
        inner = place[part] if isinstance(part, int) else place.get(part)
        if inner is None:
            inner = place[part] = [] if isinstance(following, int) else {}
        place = inner


def batches(pieces: Sequence[Piece], nbytes: int) -> Iterator[list[Piece]]:
    """Cut into batches of bounded memory; a larger piece is one by itself.

    No two pieces of one tensor are in one batch, as no rank would have them.
    """
    groups: list[list[Piece]] = []
    seen: dict[str, int] = {}
    for piece in pieces:
        number = seen[piece.key] = seen.get(piece.key, -1) + 1
        if number == len(groups):
            groups.append([])
        groups[number].append(piece)
    for group in groups:
        yield from _cut(group, nbytes)


def _cut(pieces: Sequence[Piece], nbytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        if batch and held + piece.nbytes > nbytes:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += piece.nbytes
    if batch:
        yield batch
