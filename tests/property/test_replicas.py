"""Replicas: which are kept, and that no change of the bytes on their way is missed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.checked import MOST_BYTES
from checkpointing.checksum import crc64
from checkpointing.errors import ManifestInvalid, ReplicaCorrupt
from checkpointing.plan import Extent
from checkpointing.replicas.replica import KEPT, Name, Offer, outdated
from checkpointing.replicas.taking import Check

NAMES = st.builds(
    Name,
    attempt=st.integers(1, 4),
    step=st.integers(0, 8),
    rank=st.integers(0, 3),
    world=st.just(4),
)


@given(st.sets(NAMES))
def test_of_each_rank_of_the_newest_attempt_the_newest_two_stay(names: set[Name]) -> None:
    kept = names - outdated(names)
    newest = max((name.attempt for name in names), default=0)
    for rank in range(4):
        mine = sorted((n for n in names if n.rank == rank), reverse=True)
        left = sorted((n for n in kept if n.rank == rank), reverse=True)
        assert left == mine[: len(left)]
        assert len(left) <= KEPT
        if mine and mine[0].attempt == newest:
            assert left
            assert len(left) == min(KEPT, len(mine)) or mine[len(left)].attempt < newest


@given(st.sets(NAMES))
def test_dropping_what_is_outdated_makes_nothing_else_so(names: set[Name]) -> None:
    assert outdated(names - outdated(names)) == set()


@given(st.sets(NAMES))
def test_nothing_goes_but_for_something_newer(names: set[Name]) -> None:
    for dropped in outdated(names):
        assert sum(name > dropped for name in names - outdated(names)) >= KEPT


@st.composite
def areas(draw: st.DrawFn) -> tuple[bytes, list[Extent]]:
    """Bytes and the extents in them, with gaps and empty ones."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=8))
    body, extents = bytearray(), []
    for number, (gap, nbytes) in enumerate(sizes):
        body += bytes(gap)
        own = draw(st.binary(min_size=nbytes, max_size=nbytes))
        extents.append(
            Extent(
                name=str(number),
                kind="local",
                owner=0,
                dtype="uint8",
                shape=(nbytes,),
                offset=len(body),
                nbytes=nbytes,
                crc64=crc64(own),
            )
        )
        body += own
    return bytes(body) + bytes(draw(st.integers(0, 9))), extents


def feed(body: bytes, extents: list[Extent], cuts: list[int]) -> None:
    check, at = Check(extents, len(body)), 0
    for end in [*sorted(min(cut, len(body)) for cut in cuts), len(body)]:
        check.feed(memoryview(body)[at:end])
        at = end
    check.feed(memoryview(b""))
    check.finish()


@given(areas(), st.lists(st.integers(0, 300), max_size=6), st.data())
def test_however_the_bytes_come_the_whole_passes_and_a_changed_bit_does_not(
    area: tuple[bytes, list[Extent]], cuts: list[int], data: st.DataObject
) -> None:
    body, extents = area
    feed(body, extents, cuts)
    places = [at for e in extents for at in range(e.offset, e.offset + e.nbytes)]
    if places:
        at, bit = data.draw(st.sampled_from(places)), data.draw(st.integers(0, 7))
        changed = bytearray(body)
        changed[at] ^= 1 << bit
        with pytest.raises(ReplicaCorrupt, match="fail their CRC"):
            feed(bytes(changed), extents, cuts)


@given(areas(), st.data())
def test_extents_that_overlap_or_leave_the_area_are_refused(
    area: tuple[bytes, list[Extent]], data: st.DataObject
) -> None:
    body, extents = area
    full = [number for number, extent in enumerate(extents) if extent.nbytes]
    if not full:
        return
    number = data.draw(st.sampled_from(full))
    spoilt = data.draw(
        st.sampled_from(
            [{"nbytes": len(body) + 1}, {"offset": len(body)}, {"offset": -1}, {"nbytes": -1}]
        )
    )
    extents[number] = replace(extents[number], **spoilt)
    with pytest.raises(ReplicaCorrupt):
        Check(extents, len(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
OFFER: dict[str, object] = {
    "name": {"attempt": 1, "step": 2, "rank": 0, "world": 1},
    "staged_at": 1.5,
    "tiers": 3,
    "nbytes": 10,
    "meta_nbytes": 5,
    "meta_crc64": 7,
    "meta_room": 4096,
    "data_room": 8192,
}


@given(st.dictionaries(st.sampled_from([*OFFER, "more"]), JSON, min_size=1))
def test_whatever_is_offered_every_number_of_it_is_bounded(change: dict[str, object]) -> None:
    try:
        offer = Offer.from_json({**OFFER, **change})
    except ManifestInvalid:
        return
    assert 0 <= offer.nbytes <= offer.data_room <= 1 << 50
    assert 0 <= offer.meta_nbytes <= offer.meta_room <= MOST_BYTES
    assert 0 <= offer.name.rank < offer.name.world
    assert "/" not in offer.name.file
    assert Offer.from_json(offer.to_json()) == offer
