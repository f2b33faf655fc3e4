"""What is staged does not depend on how: at once, beside training, or from what is remembered."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing import leaves
from checkpointing.plan import make_plan
from checkpointing.sharded import Sharded
from checkpointing.skeletons import lengthen, shorten
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.meta import Meta, MetaText, Sums
from checkpointing.stage.recipe import Recipe, values_of
from checkpointing.stage.stager import Stager
from checkpointing.tree import flatten

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
LARGE = st.integers(40_000, 90_000).map(lambda n: (n,))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool))


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    shape = draw(SHAPES | LARGE)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    value = torch.randint(0, 100, shape, generator=generator).to(draw(DTYPES))
    if draw(st.booleans()) and value.dim() > 1:
        value = value.transpose(0, 1)
    return value


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    raw = np.asarray(rng.integers(0, 100, draw(SHAPES | LARGE)))
    return np.asfortranarray(raw.astype(draw(st.sampled_from(("float64", "int16", "bool")))))


@st.composite
def pieces(draw: st.DrawFn) -> Any:
    local = draw(tensors().filter(lambda t: t.dim() > 0))
    start = draw(st.integers(0, 3))
    shape = (local.shape[0] + start + 1, *local.shape[1:])
    return Sharded(local=local, shape=shape, start=(start, *[0] * (local.dim() - 1)))


def trees(*leaf: Any) -> Any:
    keys = st.text(max_size=3) | st.integers(-3, 3)
    values = st.one_of(SCALARS, tensors(), arrays(), *leaf)
    return st.recursive(
        values,
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
        ),
        max_leaves=6,
    )


STATES = st.dictionaries(st.text(max_size=3), trees(pieces()), max_size=3)
OWN = st.dictionaries(st.text(max_size=3), trees(), max_size=2)


def keepable(state: dict[str, Any]) -> bool:
    try:
        flatten(state)
    except TypeError:  # the keys 1 and "1" of one dict
        return False
    return True


def changed(value: Any, by: int) -> Any:
    """The same structure with other content."""
    if isinstance(value, dict):
        return {key: changed(child, by) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(child, by) for child in value)
    if isinstance(value, Sharded):
        return Sharded(local=changed(value.local, by), shape=value.shape, start=value.start)
    if isinstance(value, torch.Tensor):
        return (value.clone().to(torch.float64) + by).to(value.dtype)
    if isinstance(value, np.ndarray):
        return (value + by).astype(value.dtype)
    return by if isinstance(value, int) else value


def slots(path: Path) -> dict[int, tuple[Meta, bytes]]:
    arena = MappedArena(path)
    found = {
        staged.step: (
            Meta.read(arena, staged.index),
            bytes(arena.data(staged.index)[: staged.nbytes]),
        )
        for staged in arena.staged()
    }
    arena.close()
    return found


def extents(slot: tuple[Meta, bytes]) -> list[bytes]:
    meta, data = slot
    return [data[e.offset : e.offset + e.nbytes] for e in meta.extents]


def mark_sent(path: Path) -> None:
    arena = MappedArena(path)
    for staged in arena.staged():
        arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
    arena.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES.filter(keepable), OWN.filter(keepable), st.integers(1, 3))
def test_what_is_written_from_pieces_is_what_is_written_whole(
    state: dict[str, Any], own: dict[str, Any], world: int
) -> None:
    replica, local = flatten(state), flatten(own)
    plan = make_plan(replica, local, 0, world)
    recipes = Recipe(replica), Recipe(local)
    text = MetaText(recipes[0].literals, recipes[1].literals, plan.extents)
    meta = Meta(
        short=shorten(replica.skeleton),
        local_short=shorten(local.skeleton),
        extents=plan.extents,
    ).pack()
    assert lengthen(shorten(replica.skeleton)) == replica.skeleton
    values = values_of(replica.skeleton) + values_of(local.skeleton)
    assert text.pack(values, Sums([0] * len(plan.extents))) == meta
    assert len(meta) <= text.longest(values)
    other = changed(state, 7)
    took = recipes[0].take(other)
    assert took is not None
    assert took[1] == values_of(flatten(other).skeleton)
    assert [id(leaf) for leaf in took[0]] == [id(x) for x in flatten(other).leaves.values()]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES.filter(keepable), STATES.filter(keepable))
def test_another_structure_is_never_taken_for_the_remembered_one(
    state: dict[str, Any], other: dict[str, Any]
) -> None:
    mine, theirs = flatten(state), flatten(other)
    took = Recipe(mine).take(other)
    if took is None:
        return
    assert [list(make_plan(f, flatten({}), 0, 1).extents) for f in (mine,)] == [
        list(make_plan(f, flatten({}), 0, 1).extents) for f in (theirs,)
    ]
    literals, values = Recipe(mine).literals, took[1]
    assert literals == Recipe(theirs).literals
    assert values == values_of(theirs.skeleton)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES.filter(keepable), OWN.filter(keepable))
def test_staged_beside_training_is_staged_at_once_bit_for_bit(
    state: dict[str, Any], own: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "BLOCK", 1 << 16)
        plain, beside = Path(folder) / "arena-0", Path(folder) / "arena-1"
        one, other = (Stager(p, attempt=1, rank=0, world=1) for p in (plain, beside))
        for step, content in enumerate((state, changed(state, 3), changed(state, 5)), start=1):
            one.stage(step, content, own)
            other.begin(step, content, own, late=None)
            other.fence()
            assert other.join() == []
            fresh = Path(folder) / f"arena-{step + 1}"
            Stager(fresh, attempt=1, rank=0, world=1).stage(step, content, own)
            found = [slots(path)[step] for path in (plain, beside, fresh)]
            assert found[0][0] == found[1][0] == found[2][0]
            assert extents(found[0]) == extents(found[1]) == extents(found[2])
            for path in (plain, beside):
                mark_sent(path)
