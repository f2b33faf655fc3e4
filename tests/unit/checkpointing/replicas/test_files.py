"""Replicas as files: taken in whole, checked, the newest two kept, brought back as an arena."""

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from checkpointing.errors import ReplicaCorrupt, ReplicaError
from checkpointing.replicas import server
from checkpointing.replicas.exchange import send_body
from checkpointing.replicas.fetching import DISK, Fetched, Fetcher, Order
from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.room import Room
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import FileSource, SnapshotFile, Source
from checkpointing.replicas.wire import Line
from checkpointing.stage.arena import MappedArena, peek
from checkpointing.store.pace import Pacer
from tests.unit.checkpointing.replicas.made import (
    SECRET,
    Rank,
    assert_restores,
    put_on,
    served,
    shelf,
)


def fetch(fetcher: Fetcher, wanted: Order) -> Fetched:
    fetcher.accept(wanted)
    return fetcher.fetch(wanted)


def steps(held: Shelf) -> list[int]:
    return [offer.name.step for offer in held.held()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def order(folder: Path, name: Name, *sources: str) -> Order:
    fields = {"id": 1, **name.to_json(), "from": list(sources), "arena": str(folder / "arena-0")}
    return Order.from_json(fields, folder)


def test_the_newest_two_of_a_rank_are_kept(tmp_path: Path) -> None:
    held, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    for step in (1, 2, 3):
        put_on(held, rank, step)
    assert steps(held) == [3, 2]
    assert len(files(tmp_path / "s")) == 2
    assert not held.needs(Name(attempt=1, step=1, rank=0, world=1))
    assert steps(shelf(tmp_path / "s")) == [3, 2]


def test_a_replica_is_an_arena_that_a_rank_could_restore_from(tmp_path: Path) -> None:
    held = shelf(tmp_path / "s")
    offer = put_on(held, Rank(tmp_path / "n", 3, 8), 5)
    path = tmp_path / "s" / offer.name.file
    assert_restores(path, offer.name)
    with SnapshotFile(path) as snapshot:
        assert snapshot.offer(0) == offer
    assert path.stat().st_blocks * 512 < path.stat().st_size  # room without content takes none


@pytest.mark.parametrize("area", ["meta", "data"])
def test_a_flipped_byte_is_found_and_nothing_is_kept(tmp_path: Path, area: str) -> None:
    held, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    rank.stage(1)
    with SnapshotFile(rank.path) as snapshot:
        offer = snapshot.offer(0)
        at = snapshot.capacities.meta_at(0) if area == "meta" else snapshot.capacities.data_at(0)
        byte = os.pread(snapshot.file.fileno(), 1, at + 100)
        os.pwrite(snapshot.file.fileno(), bytes([byte[0] ^ 4]), at + 100)
        source = FileSource(snapshot, 0, offer, Pacer())
        with (
            held.room_for(offer) as share,
            pytest.raises(ReplicaCorrupt, match=r"meta fails|'w'.* fail their CRC"),
        ):
            held.keep(offer, source, share)
    assert held.held() == ()
    assert files(tmp_path / "s") == []


def test_what_a_killed_process_left_is_dropped_and_what_was_whole_stays(tmp_path: Path) -> None:
    held, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    names = [put_on(held, rank, step).name for step in (1, 2)]
    whole = (tmp_path / "s" / names[0].file).read_bytes()
    half = tmp_path / "s" / Name(attempt=1, step=3, rank=0, world=1).file
    half.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "s" / ".coming-0123").write_bytes(b"x")
    (tmp_path / "s" / Name(attempt=1, step=4, rank=0, world=1).file).write_bytes(whole)
    (tmp_path / "s" / "of somebody else").write_bytes(b"x")
    assert steps(shelf(tmp_path / "s")) == [2, 1]
    assert files(tmp_path / "s") == ["of somebody else", *sorted(name.file for name in names)]


def test_of_two_the_older_goes_when_memory_is_short_and_the_only_one_never(tmp_path: Path) -> None:
    room = {"memory": 1 << 30}
    (tmp_path / "s").mkdir()
    held = Shelf(tmp_path / "s", Room(tmp_path / "s", lambda _: room))
    rank = Rank(tmp_path / "n")
    put_on(held, rank, 1)
    put_on(held, rank, 2)
    room["memory"] = 1000
    with pytest.raises(ReplicaError, match=r"memory has 0\.00 GiB left"):
        put_on(held, rank, 3)
    assert steps(held) == [2]
    with pytest.raises(ReplicaError, match="no room for rank 0 step 4"):
        put_on(held, rank, 4)
    assert steps(held) == [2]


def test_snapshots_on_their_way_count_as_written(tmp_path: Path) -> None:
    room = Room(tmp_path, lambda _: {"memory": 100})
    with room.share(60) as share:
        with pytest.raises(ReplicaError, match="are needed and memory has"):
            room.share(60)
        share.written(20)
        room.share(60).written(60)
    room.share(100)


def test_a_replica_that_is_dropped_meanwhile_can_still_be_read(tmp_path: Path) -> None:
    held = shelf(tmp_path / "s")
    offer = put_on(held, Rank(tmp_path / "n"), 1)
    with held.open(offer.name) as snapshot:
        held.clear()
        assert files(tmp_path / "s") == []
        assert snapshot.offer(0) == offer
    with pytest.raises(ReplicaError, match="no replica of rank 0 step 1 attempt 1"):
        held.open(offer.name)


def test_a_replica_whose_file_is_spoilt_is_known_no_more(tmp_path: Path) -> None:
    held, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    first, second = (put_on(held, rank, step).name for step in (1, 2))
    (tmp_path / "s" / first.file).unlink()
    (tmp_path / "s" / second.file).write_bytes(bytes(20_000))
    for name in (first, second):
        with pytest.raises(ReplicaError, match=r"is gone|is spoilt"):
            held.open(name)
    assert held.held() == ()


def test_a_fetched_arena_has_both_slots_and_goes_on_as_the_old_one(tmp_path: Path) -> None:
    disk, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    name = put_on(disk, rank, 7).name
    new = tmp_path / "new"
    new.mkdir()
    fetcher = Fetcher(new, Room(new), disk, SECRET)
    fetched = fetch(fetcher, order(new, name, DISK))
    assert (fetched.source, fetched.error) == (DISK, "")
    assert_restores(new / "arena-0", name)
    assert (new / "arena-0").stat().st_size == rank.path.stat().st_size
    inode = (new / "arena-0").stat().st_ino
    Rank(new, attempt=2).stage(8)
    assert [staged.step for staged in peek(new / "arena-0")] == [8, 7]
    assert (new / "arena-0").stat().st_ino == inode
    assert files(new) == ["arena-0"]


def test_a_fetched_arena_has_one_slot_where_memory_is_scarce(tmp_path: Path) -> None:
    disk, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    name = put_on(disk, rank, 7).name
    room = Room(tmp_path / "n", lambda _: {"memory": rank.path.stat().st_size - 1})
    fetcher = Fetcher(tmp_path / "n", room, disk, SECRET)
    assert fetch(fetcher, order(tmp_path / "n", name, DISK)).source == DISK
    assert_restores(rank.path, name)
    arena = MappedArena(rank.path)
    assert arena.capacities.slots == 1
    arena.close()


def test_a_fetch_tells_why_no_source_served_and_leaves_the_arena_alone(tmp_path: Path) -> None:
    disk, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    offer = put_on(disk, rank, 1)
    before = rank.path.read_bytes()
    path = tmp_path / "s" / offer.name.file
    with SnapshotFile(path) as snapshot:
        os.pwrite(snapshot.file.fileno(), b"\xff" * 8, snapshot.capacities.data_at(0))
    fetcher = Fetcher(tmp_path / "n", Room(tmp_path / "n"), disk, SECRET)
    wanted = order(tmp_path / "n", offer.name, "127.0.0.1:1", "nonsense", DISK)
    fetched = fetch(fetcher, wanted)
    assert fetched.source == ""
    assert "127.0.0.1:1: " in fetched.error
    assert "'nonsense' is no host:port" in fetched.error
    assert "fail their CRC" in fetched.error
    assert rank.path.read_bytes() == before
    assert files(tmp_path / "n") == ["arena-0"]


def test_a_node_that_dies_while_it_gives_a_copy_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave: list[str] = []

    def half(line: Line, snapshot: SnapshotFile, index: int, offer: Offer, pace: Pacer) -> None:
        gave.append(offer.name.file)
        if len(gave) > 1:
            return send_body(line, snapshot, index, offer, pace)
        for at, nbytes in list(snapshot.spans(index, offer))[:1]:
            line.send_file(snapshot.file, at, nbytes // 2, pace)
        return line.close()

    monkeypatch.setattr(server, "send_body", half)
    rank, new = Rank(tmp_path / "n"), tmp_path / "new"
    for folder in (new, tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    with served(tmp_path / "a") as dying, served(tmp_path / "b") as other:
        name = put_on(dying.shelf, rank, 7).name
        put_on(other.shelf, rank, 7)
        fetcher = Fetcher(new, Room(new), None, SECRET)
        fetched = fetch(fetcher, order(new, name, dying.address, other.address))
    assert (fetched.source, fetched.error) == (other.address, "")
    assert len(gave) == 2
    assert_restores(new / "arena-0", name)
    assert files(new) == ["arena-0"]


class Slow:
    """A source that gives its order up when its first bytes have been read."""

    def __init__(self, fetcher: Fetcher, number: int) -> None:
        self._fetcher = fetcher
        self._number = number
        self.read = 0

    def read_into(self, out: memoryview) -> None:
        self.read += out.nbytes
        self._fetcher.give_up(self._number)


def test_a_fetch_that_nobody_waits_for_any_more_reads_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    offer = put_on(disk, rank, 1)
    fetcher = Fetcher(tmp_path / "n", Room(tmp_path / "n"), disk, SECRET)
    wanted = order(tmp_path / "n", offer.name, DISK, "127.0.0.1:1")
    source = Slow(fetcher, wanted.number)
    opened: list[str] = []

    def open_(place: str, _: Name) -> AbstractContextManager[tuple[Offer, Source]]:
        opened.append(place)
        return nullcontext((offer, source))

    monkeypatch.setattr(fetcher, "_opened", open_)
    assert "nobody waits" in fetch(fetcher, wanted).error
    assert source.read == offer.meta_nbytes
    assert opened == [DISK]
    assert files(tmp_path / "n") == ["arena-0"]


def test_a_fetch_that_nobody_waits_for_any_more_replaces_no_arena(tmp_path: Path) -> None:
    disk, rank = shelf(tmp_path / "s"), Rank(tmp_path / "n")
    name = put_on(disk, rank, 1).name
    inode = rank.path.stat().st_ino
    fetcher = Fetcher(tmp_path / "n", Room(tmp_path / "n"), disk, SECRET)
    wanted = order(tmp_path / "n", name, DISK)
    fetcher.accept(wanted)
    fetcher.give_up(wanted.number)
    assert "nobody waits" in fetcher.fetch(wanted).error
    assert rank.path.stat().st_ino == inode
    assert files(tmp_path / "n") == ["arena-0"]
    assert fetch(fetcher, wanted).source == DISK


def test_a_folder_that_was_deleted_is_made_again_and_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    held, rank = shelf(tmp_path / "disk" / "s"), Rank(tmp_path / "n")
    put_on(held, rank, 1)
    shutil.rmtree(tmp_path / "disk")
    assert steps(held) == []
    put_on(held, rank, 2)
    assert steps(held) == steps(shelf(tmp_path / "disk" / "s")) == [2]


def test_what_was_held_of_a_slot_ends_no_hold_on_what_lies_there_now(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.stage(1)
    with SnapshotFile(rank.path) as snapshot:
        header = snapshot.headers[0]
        now, before = header.record.sequence, header.record.sequence - 2
        header.hold(now, 60.0)
        for for_s in (60.0, 0.0):
            header.hold(before, for_s)
            assert header.is_held(now)
        header.hold(now, 0.0)
        assert not header.is_held(now)
