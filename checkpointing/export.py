"""Writes the tensors of a committed checkpoint to a folder that other programs read."""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpointing.manifest import Manifest
from checkpointing.safetensors import ExportRefused, File, index_of, lay_out, shards
from checkpointing.spool import spool
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import (
    WholeTensor,
    batches,
    below,
    read_tensors,
    require_objects,
    whole_tensors,
)

SHARD_BYTES: Final = 5 * 10**9
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        files: Names of the files with tensors.
        tensors: How many tensors.
        nbytes: Bytes of the tensors.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export_safetensors(
    store: ObjectStore,
    manifest: Manifest,
    folder: Path,
    *,
    subtree: str = "model",
    strip: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write safetensors files and their index, as `transformers` reads them.

    A name is the path below the subtree, its parts joined by ".". Memory is bounded by the batch
    that is read at a time, whatever the size of the tensors. The folder appears when all is there.

    Args:
        store: Holds the checkpoint.
        manifest: The checkpoint.
        folder: Must not exist, or be empty.
        subtree: What of the state to write.
        strip: Beginning to take off every name that has it, such as "module.".
        shard_bytes: Bound on the tensors of one file; a larger tensor has a file of its own.

    Raises:
        ExportRefused: Nothing to write, a taken folder, names that collide, an unknown type.
        RestoreFailed: Bytes fail their CRC.
        ManifestInvalid: The objects are not as the manifest says.
        StoreError: The store could not deliver.
        OSError: No room, or no permission.
    """
    named = _named(below(whole_tensors(manifest), subtree), subtree, strip)
    parts = shards(named, shard_bytes)
    layouts = [lay_out(part) for part in parts]
    require_objects(store, manifest)
    count = len(layouts)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    nbytes = sum(tensor.nbytes for tensor in named.values())
    with arriving(folder) as place:
        for name, layout in zip(names, layouts, strict=True):
            _write(store, manifest, place / name, layout)
        files = dict(zip(names, (list(part) for part in parts), strict=True))
        _write_small(place / _INDEX, index_of(files, nbytes))
    return Exported(folder=folder, files=tuple(names), tensors=len(named), nbytes=nbytes)


@contextmanager
def arriving(folder: Path) -> Iterator[Path]:
    """Give a new folder beside the wanted one, and its name when everything went well.

    Raises:
        ExportRefused: The wanted one is taken.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportRefused(f"{folder}: exists and is no empty folder; choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    place.mkdir()
    try:
        yield place
        place.rename(folder)  # an empty folder is replaced
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _named(tensors: Sequence[WholeTensor], subtree: str, strip: str) -> Mapping[str, WholeTensor]:
    cut = len([part for part in subtree.split("/") if part])
    found: dict[str, WholeTensor] = {}
    for tensor in tensors:
        name = ".".join(tensor.parts[cut:] or tensor.parts[-1:]).removeprefix(strip)
        if not name or name == "__metadata__":
            raise ExportRefused(f"{tensor.name}: has no name left that a file can have")
        if name in found:
            raise ExportRefused(f"{tensor.name} and {found[name].name} would both be {name}")
        found[name] = tensor
    if not found:
        raise ExportRefused(f"no tensors below {subtree!r}")
    return found


def _write(store: ObjectStore, manifest: Manifest, path: Path, layout: File) -> None:
    offsets = {placed.tensor.name: placed.offset for placed in layout.placed}
    with spool(path, layout.nbytes) as held:
        held.room(0, len(layout.header))[:] = memoryview(layout.header)
        for batch in batches(placed.tensor for placed in layout.placed):
            rooms = [(tensor, held.room(offsets[tensor.name], tensor.nbytes)) for tensor in batch]
            read_tensors(store, manifest, rooms)
            start = offsets[batch[0].name]
            held.settle(start, sum(tensor.nbytes for tensor in batch))
            del rooms


def _write_small(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
