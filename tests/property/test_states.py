"""Plan, manifest and restore over states as torch has them: strides, ties, emptiness, dtypes."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.boxes import split
from checkpointing.commit import UploadRecord, commit
from checkpointing.resolver import find_commit
from checkpointing.restore import Point, restore_from_store
from checkpointing.sharded import Sharded
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import store_at

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DTYPES = [
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
        *("uint16", "uint32"),
    )
    if hasattr(torch, name)
]
FORMS = ("plain", "transposed", "sliced", "strided", "expanded", "offset", "flipped", "channels")
TIES = ("none", "same object", "same storage", "overlapping")


def content(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Any bits at all, NaNs with payloads and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    flat = int(torch.Size(shape).numel())
    raw = torch.randint(0, 256, (flat * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def formed(value: Any, form: str) -> Any:
    """The same elements in other memory."""
    if form == "transposed" and value.dim() >= 2:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "sliced" and value.dim() >= 1:
        room = torch.zeros((*value.shape[:-1], value.shape[-1] + 3), dtype=value.dtype)
        room[..., 2 : 2 + value.shape[-1]] = value
        return room[..., 2 : 2 + value.shape[-1]]
    if form == "strided" and value.dim() >= 1:
        room = torch.zeros((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)
        room[..., ::2] = value
        return room[..., ::2]
    if form == "offset":
        room = torch.zeros(value.numel() + 3, dtype=value.dtype)
        room[3:] = value.reshape(-1)
        return room[3:].view(value.shape)
    if form == "flipped" and value.dim() == 3:
        return value.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if form == "channels" and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def bits(value: Any) -> bytes:
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.copy_(value.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Sharded) else leaf


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[tuple[int, ...], Any, int]]:
    many = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    return {
        f"t{n}": (draw(shapes), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20)))
        for n in range(many)
    }


class Case:
    """Tensors, how each is cut over a world, and how memory holds them."""

    def __init__(self, found: dict[str, Any], data: st.DataObject) -> None:
        self._found = found
        self._data = data
        self.tie = data.draw(st.sampled_from(TIES), label="tie")
        self.dtype = data.draw(st.sampled_from(DTYPES), label="tied dtype")

    def state(self, rank: int, world: int, cuts: dict[str, int], *, empty: bool) -> dict[str, Any]:
        model: dict[str, Any] = {}
        for name, (shape, dtype, seed) in self._found.items():
            whole, form = content(shape, dtype, seed), self._data.draw(st.sampled_from(FORMS))
            if not shape or not cuts[name]:
                value = torch.zeros_like(whole) if empty else whole
                model[name] = formed(value, form)
                continue
            pieces = min(cuts[name], world)
            start, length = split(shape[0], pieces)[rank % pieces]
            piece = whole[start : start + length]
            holders = [r for r in range(world) if r % pieces == rank % pieces]
            model[name] = Sharded(
                local=formed(torch.zeros_like(piece) if empty else piece.clone(), form),
                shape=shape,
                start=(start, *[0] * (len(shape) - 1)),
                copy=holders.index(rank),
                copies=len(holders),
            )
        return {"model": {**model, **self._tied(empty=empty)}, "seen": 0 if empty else 12}

    def _tied(self, *, empty: bool) -> dict[str, Any]:
        if self.tie == "none":
            return {}
        one = content((6,), self.dtype, 5)
        one = torch.zeros_like(one) if empty else one
        if self.tie == "same object":
            return {"head": one, "embedding": one}
        if self.tie == "same storage":
            return {"head": one, "embedding": one.view(2, 3)}
        return {"head": one[:4], "embedding": one[2:]}


def saved(store: DirectoryStore, folder: Path, states: list[dict[str, Any]]) -> None:
    records = []
    for rank, state in enumerate(states):
        path = folder / f"arena-{rank}"
        Stager(path, attempt=1, rank=rank, world=len(states)).stage(5, state, {"rank": rank})
        arena = MappedArena(path)
        sent = send(store, "run", arena, arena.staged()[0])
        arena.close()
        crc = sent.index_crc64
        records.append(UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=crc))
    assert commit(store, "run", 5, 1, records, len(states), "w").committed


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(tensors(), st.data())
def test_what_any_world_saved_in_any_memory_comes_back_bit_for_bit(
    found: dict[str, Any], data: st.DataObject
) -> None:
    case = Case(found, data)

    def cuts() -> dict[str, int]:
        return {name: data.draw(st.integers(0, 3)) for name in found}

    stored = {name: data.draw(st.booleans(), label=f"{name} is sharded") for name in found}

    def drawn() -> dict[str, int]:
        return {name: max(1, n) if stored[name] else 0 for name, n in cuts().items()}

    with tempfile.TemporaryDirectory() as name:
        store = store_at(Path(name) / "store")
        world, layout = data.draw(st.integers(1, 3), label="world"), drawn()
        states = [case.state(rank, world, layout, empty=False) for rank in range(world)]
        saved(store, Path(name), states)
        assert verify(store, find_commit(store, "run", 5)).problems == ()
        for _ in range(2):
            other, layout = data.draw(st.integers(1, 4), label="other world"), drawn()
            for rank in range(other):
                state = case.state(rank, other, layout, empty=True)
                place = Point(step=5, attempt=1)
                restore_from_store(store, "run", place, rank, other, state, None)
                wanted = case.state(rank, other, layout, empty=False)
                assert state["seen"] == 12
                for key, value in wanted["model"].items():
                    assert bits(local(state["model"][key])) == bits(local(value)), key
