"""The document that commits a DCP save: JSON that is checked before it is believed."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.checksum import crc64  # noqa: E402
from checkpointing.dcp.document import VALUE, Chunk, StoredObject, pack, unpack  # noqa: E402
from checkpointing.errors import CommitRefused, ManifestInvalid  # noqa: E402

pytestmark = pytest.mark.torch

OBJECT = StoredObject(key="data/a-1/rank-00000-0000.bin", nbytes=100, crc64=3)


def chunk(nbytes: int, shape: tuple[int, ...], dtype: str = "float32", offset: int = 0) -> Chunk:
    return Chunk(stored=OBJECT, offset=offset, nbytes=nbytes, crc64=5, dtype=dtype, shape=shape)


def saved() -> tuple[Metadata, dict[MetadataIndex, Chunk]]:
    halves = [
        ChunkStorageMetadata(offsets=torch.Size([n, 0]), sizes=torch.Size([2, 3])) for n in (0, 2)
    ]
    properties = TensorProperties(dtype=torch.float32, requires_grad=True)
    metadata = Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties, torch.Size([4, 3]), halves),
            "n": BytesStorageMetadata(),
        },
        planner_data={"w": ("a", 0, "w"), "n": ("n",)},
    )
    chunks = {
        MetadataIndex("w", (0, 0)): chunk(24, (2, 3)),
        MetadataIndex("w", (2, 0)): chunk(24, (2, 3), offset=24),
        MetadataIndex("n"): chunk(4, (4,), dtype=VALUE, offset=48),
    }
    return metadata, chunks


def test_a_document_gives_back_what_it_was_made_of() -> None:
    metadata, chunks = saved()
    found = unpack(pack(metadata, chunks, {"save": "x"}))
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert list(found.state_dict_metadata) == ["w", "n"]
    assert found.planner_data == metadata.planner_data
    assert found.storage_data == chunks


def test_planner_data_of_another_kind_is_kept_as_a_value() -> None:
    metadata, chunks = saved()
    metadata.planner_data = {"mine": [1, (2, b"x")]}
    assert unpack(pack(metadata, chunks, {})).planner_data == {"mine": [1, (2, b"x")]}


def test_what_no_rank_stored_is_not_committed() -> None:
    metadata, chunks = saved()
    for index in list(chunks):
        rest = {key: value for key, value in chunks.items() if key != index}
        with pytest.raises(CommitRefused, match=f"{index.fqn}.*planned, and no rank stored it"):
            pack(metadata, rest, {})


def test_a_tensor_that_is_not_whole_is_not_committed() -> None:
    metadata, chunks = saved()
    metadata.state_dict_metadata["w"].chunks.pop()
    with pytest.raises(CommitRefused, match="6 of 12 elements; was it saved by some of its ranks"):
        pack(metadata, chunks, {})


def altered(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a document whose CRC is right and whose content is not."""
    head, body = pack(*saved(), {}).split(b"\n", 1)
    fields = copy.deepcopy(json.loads(body))
    change(fields)
    packed = json.dumps(fields).encode()
    head = json.dumps({**json.loads(head), "crc64": crc64(packed)}).encode()
    return head + b"\n" + packed


def first(fields: dict[str, Any]) -> Any:
    return fields["tensors"]["w"]["chunks"][0]


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("traversal", lambda f: f["objects"][0].__setitem__(0, "data/../../etc/passwd")),
    ("absolute", lambda f: f["objects"][0].__setitem__(0, "/data/x")),
    ("elsewhere", lambda f: f["objects"][0].__setitem__(0, "commits/x")),
    ("no key", lambda f: f["objects"][0].__setitem__(0, None)),
    ("negative object", lambda f: f["objects"][0].__setitem__(1, -1)),
    ("beyond the object", lambda f: first(f).__setitem__(3, 90)),
    ("negative offset", lambda f: first(f).__setitem__(3, -24)),
    ("no such object", lambda f: first(f).__setitem__(2, 1)),
    ("negative object number", lambda f: first(f).__setitem__(2, -1)),
    ("true object number", lambda f: first(f).__setitem__(2, False)),
    ("huge", lambda f: f["tensors"]["w"].__setitem__("shape", [1 << 62, 1 << 62])),
    ("larger than its chunks", lambda f: f["tensors"]["w"].__setitem__("shape", [400, 3])),
    ("no chunks", lambda f: f["tensors"]["w"]["chunks"].clear()),
    ("overlap", lambda f: first(f).__setitem__(0, [2, 0])),
    ("other rank", lambda f: first(f).__setitem__(0, [0])),
    ("dtype", lambda f: f["tensors"]["w"].__setitem__("dtype", "__class__")),
    ("dtype of no type", lambda f: f["tensors"]["w"].__setitem__("dtype", ["float32"])),
    ("blocks", lambda f: first(f).append({"blocks": [1, 2]})),
    ("crc", lambda f: first(f).__setitem__(4, "5")),
    ("value", lambda f: f["values"].__setitem__("n", [0, 0, 1000, 5])),
    ("tensors", lambda f: f.__setitem__("tensors", [])),
    ("no planner", lambda f: f.pop("planner")),
    ("path", lambda f: f["planner"]["paths"].__setitem__("w", [])),
    ("long path", lambda f: f["planner"]["paths"].__setitem__("w", ["a", 1 << 40])),
    ("path of lists", lambda f: f["planner"]["paths"].__setitem__("w", [["a"]])),
    ("text path", lambda f: f["planner"]["paths"].__setitem__("w", None)),
    ("pickle", lambda f: f.__setitem__("planner", {"value": {"t": "pickle", "v": "gAR9Lg=="}})),
]


@pytest.mark.parametrize("change", [c for _, c in HOSTILE], ids=[name for name, _ in HOSTILE])
def test_hostile_documents_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    assert unpack(altered(lambda _: None))
    with pytest.raises(ManifestInvalid):
        unpack(altered(change))


@pytest.mark.parametrize("raw", [b"", b"\n", b"\x80\x04}.", b"[]\n{}", b"{}\n{}", b"null\nnull"])
def test_other_bytes_are_no_document(raw: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        unpack(raw)


def test_a_newer_format_is_said() -> None:
    body = b"{}"
    head = json.dumps({"format": "everstep-dcp/2", "crc64": crc64(body)}).encode()
    with pytest.raises(ManifestInvalid, match=r"everstep-dcp/2.*this version reads everstep-dcp/1"):
        unpack(head + b"\n" + body)
