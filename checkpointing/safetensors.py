"""The safetensors format, written by hand: a length, a JSON header, the bytes of the tensors.

See https://github.com/huggingface/safetensors#format. Headers are padded to 8 bytes and tensors
lie by size of their elements, so that every one is aligned for its type.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from checkpointing import dtypes
from checkpointing.errors import CheckpointingError
from checkpointing.tensors import WholeTensor

TYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_MOST_HEADER: Final = 100_000_000  # what the reader of the format takes


class ExportRefused(CheckpointingError):
    """The wanted tensors cannot be written in the wanted form; one line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in a file.

    Attributes:
        name: Its name there.
        tensor: What is stored of it.
        offset: Where its bytes begin, from the beginning of the file.
    """

    name: str
    tensor: WholeTensor
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file to be written.

    Attributes:
        header: Its first bytes.
        placed: What follows, in order.
        nbytes: All of it.
    """

    header: bytes
    placed: tuple[Placed, ...]
    nbytes: int


def shards(named: Mapping[str, WholeTensor], most: int) -> list[dict[str, WholeTensor]]:
    """Spread tensors, in order, over files of at most so many bytes; a larger one is alone."""
    found: list[dict[str, WholeTensor]] = []
    nbytes = 0
    for name, tensor in named.items():
        if not found or nbytes + tensor.nbytes > most:
            found.append({})
            nbytes = 0
        found[-1][name] = tensor
        nbytes += tensor.nbytes
    return found


def lay_out(named: Mapping[str, WholeTensor]) -> File:
    """Return where everything goes in one file.

    Raises:
        ExportRefused: A type that the format does not have, or too many tensors for a header.
    """
    ordered = sorted(named.items(), key=lambda item: (-dtypes.itemsize(item[1].dtype), item[0]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: list[tuple[str, WholeTensor, int]] = []
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in TYPES:
            raise ExportRefused(f"{tensor.name}: safetensors has no type {tensor.dtype}")
        entries[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        ends.append((name, tensor, end))
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER:
        raise ExportRefused("too many tensors for one file; choose smaller shards")
    header = len(text).to_bytes(8, "little") + text
    placed = [
        Placed(name=name, tensor=tensor, offset=len(header) + at) for name, tensor, at in ends
    ]
    return File(header=header, placed=tuple(placed), nbytes=len(header) + end)


def index_of(files: Mapping[str, Sequence[str]], nbytes: int) -> bytes:
    """Return `model.safetensors.index.json`, which says what file has which tensor."""
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
