"""Replicas that are written over what dropped ones lay in."""

import os
from pathlib import Path

import pytest

from checkpointing.errors import ReplicaCorrupt
from checkpointing.replicas.replica import Offer
from checkpointing.replicas.room import Room
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import FileSource, SnapshotFile
from checkpointing.store.pace import Pacer
from tests.unit.checkpointing.replicas.made import Rank, assert_restores, put_on, shelf, step_in

NBYTES = 1 << 20  # most of such a file is content


def spare_files(folder: Path) -> list[int]:
    return [path.stat().st_ino for path in folder.glob(".spare-*")]


def three(tmp_path: Path, held: Shelf) -> tuple[Rank, list[Offer]]:
    rank = Rank(tmp_path / "n")
    return rank, [put_on(held, rank, step, NBYTES) for step in (1, 2, 3)]


def test_the_next_replica_is_written_over_the_dropped_one(tmp_path: Path) -> None:
    held, folder = shelf(tmp_path / "s"), tmp_path / "s"
    rank, _ = three(tmp_path, held)
    (spare,) = spare_files(folder)
    for step in (4, 5, 6, 7):
        name = put_on(held, rank, step, NBYTES).name
        assert (folder / name.file).stat().st_ino == spare
        assert_restores(folder / name.file, name, NBYTES)
        (spare,) = spare_files(folder)
    assert [offer.name.step for offer in held.held()] == [7, 6]
    again = shelf(folder)
    assert [offer.name.step for offer in again.held()] == [7, 6]
    assert spare_files(folder) == []


def test_what_somebody_reads_is_not_written_over(tmp_path: Path) -> None:
    held, folder = shelf(tmp_path / "s"), tmp_path / "s"
    rank = Rank(tmp_path / "n")
    first = put_on(held, rank, 1, NBYTES)
    before = (folder / first.name.file).read_bytes()
    with held.open(first.name) as snapshot:
        for step in (2, 3, 4, 5):
            put_on(held, rank, step, NBYTES)
        assert snapshot.offer(0) == first
        assert os.pread(snapshot.file.fileno(), len(before), 0) == before


@pytest.mark.parametrize("area", ["meta", "data"])
def test_a_flipped_byte_in_one_that_is_written_over_is_found(tmp_path: Path, area: str) -> None:
    held, folder = shelf(tmp_path / "s"), tmp_path / "s"
    rank, _ = three(tmp_path, held)
    rank.stage(4, NBYTES)
    with SnapshotFile(rank.path) as snapshot:
        index = next(i for i in range(2) if step_in(snapshot, i) == 4)
        offer, of = snapshot.offer(index), snapshot.capacities
        at = (of.meta_at(index) if area == "meta" else of.data_at(index)) + 100
        byte = os.pread(snapshot.file.fileno(), 1, at)
        os.pwrite(snapshot.file.fileno(), bytes([byte[0] ^ 4]), at)
        source = FileSource(snapshot, index, offer, Pacer())
        with held.room_for(offer) as share, pytest.raises(ReplicaCorrupt):
            held.keep(offer, source, share)
    assert [offer.name.step for offer in held.held()] == [3, 2]
    assert spare_files(folder) == []
    name = put_on(held, rank, 5, NBYTES).name
    assert_restores(folder / name.file, name, NBYTES)


def test_memory_that_is_kept_is_given_back_when_it_is_short(tmp_path: Path) -> None:
    folder, free = tmp_path / "s", {"memory": 1 << 40}
    folder.mkdir()
    room = Room(folder, lambda _: free if spare_files(folder) else {"memory": 1 << 40})
    three(tmp_path, Shelf(folder, room))
    assert spare_files(folder)
    free["memory"] = 100
    with room.share(NBYTES):
        assert spare_files(folder) == []


def test_memory_that_nobody_needs_for_a_while_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, folder = shelf(tmp_path / "s"), tmp_path / "s"
    three(tmp_path, held)
    held.drop_idle()
    assert spare_files(folder)
    monkeypatch.setattr("checkpointing.replicas.spares._IDLE_S", 0.0)
    held.drop_idle()
    assert spare_files(folder) == []
