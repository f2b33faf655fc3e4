"""Watched folders: kept whole, deleted exactly, and given back bit for bit."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from checkpointing.errors import (
    ManifestInvalid,
    NothingUsable,
    ObjectMissing,
    StoreUnavailable,
)
from checkpointing.sealed import seal
from checkpointing.store.directory import DirectoryStore
from checkpointing.watched import attempts, documents, names, verbs
from checkpointing.watched.claim import OtherFolder
from checkpointing.watched.disk import Finished
from checkpointing.watched.documents import Part, leads_out
from checkpointing.watched.rules import to_stay
from tests.unit.checkpointing.watched import NAME, Watch, content, node_rules, write

SMALL = {"model.bin": b"m" * 5000, "sub/rng.bin": b"r" * 17, "empty": b""}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("documents", "sending"):
        monkeypatch.setattr(f"checkpointing.watched.{module}.PIECE", 4096)


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_a_folder_comes_back_with_everything_that_was_in_it(watch: Watch, tmp_path: Path) -> None:
    folder = watch.out / "checkpoint-5"
    write(folder, {**SMALL, "odd name \udcff\n=": b"x", ".metadata": b"meta"})
    (folder / "nothing/in/it").mkdir(parents=True)
    (folder / "latest").symlink_to("sub/rng.bin")
    (folder / "model.bin").chmod(0o755)
    os.utime(folder / "model.bin", ns=(1, 123_456_789))
    watch.poll()
    assert watch.told("committed") == ["checkpoint-5"]
    assert watch.fetched() == content(folder)
    back = tmp_path / "back/checkpoint-5"
    assert (back / "nothing/in/it").is_dir()
    assert str((back / "latest").readlink()) == "sub/rng.bin"
    assert stat.S_IMODE((back / "model.bin").stat().st_mode) == 0o755
    assert (back / "model.bin").stat().st_mtime_ns == 123_456_789
    assert sorted(path.name for path in (tmp_path / "back").iterdir() if path.is_dir()) == [
        "checkpoint-5"
    ]


def test_a_single_file_is_an_entry_too(watch: Watch) -> None:
    (watch.out / "checkpoint-epoch=1-step=9.ckpt").write_bytes(b"c" * 3000)
    watch.poll()
    assert watch.fetched() == {"checkpoint-epoch=1-step=9.ckpt": b"c" * 3000}


def test_quiet_means_that_nothing_changed_for_the_while(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {"finished": Finished(how="quiet", quiet_s=60.0)})
    write(watch.out / "checkpoint-1", {"a": b"1"})
    watch.poll()
    watch.poll(59.0)
    write(watch.out / "checkpoint-1", {"b": b"2"})
    watch.poll(2.0)
    watch.poll(59.0)
    assert not watch.told("committed")
    assert watch.watching.pending == ("checkpoint-1",)
    watch.poll(2.0)
    assert watch.told("committed") == ["checkpoint-1"]
    assert not watch.watching.pending


def test_a_marker_says_when_a_folder_is_whole(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {"finished": Finished(how="marker", marker="sub/done")})
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    assert not watch.told("uploaded")
    write(watch.out / "checkpoint-1", {"sub/done": b""})
    watch.poll()
    assert watch.told("committed") == ["checkpoint-1"]


def test_a_temporary_file_says_that_somebody_still_writes(watch: Watch) -> None:
    write(watch.out / "checkpoint-1", {"a": b"1", "model.bin.tmp": b"half"})
    write(watch.out / ".checkpoint-2", {"a": b"1"})
    (watch.out / "checkpoint-latest").symlink_to("checkpoint-1")
    watch.poll()
    watch.poll()
    assert not watch.told("uploaded")
    assert watch.said == ["not finished: model.bin.tmp is in it"]


def test_the_newest_stays_and_others_go_only_when_committed(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {"delete": True})
    for step in (9, 10, 100):
        write(watch.out / f"checkpoint-{step}", SMALL)
    watch.poll()
    assert watch.told("committed") == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]
    assert watch.told("removed") == ["checkpoint-9", "checkpoint-10"]
    assert sorted(p.name for p in watch.out.iterdir()) == [".everstep-watch.lock", "checkpoint-100"]
    assert watch.fetched("checkpoint-9") == SMALL


def test_the_newest_by_number_and_by_time_stay() -> None:
    ages = {"checkpoint-900": 1, "checkpoint-500": 3, "checkpoint-400": 2}
    assert to_stay(ages, 1) == {"checkpoint-900", "checkpoint-500"}
    assert to_stay(ages, 0) == frozenset()


def test_what_was_added_or_changed_after_the_upload_is_not_deleted(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 1})
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    write(watch.out / "checkpoint-1", {"late": b"late"})
    write(watch.out / "checkpoint-2", SMALL)
    watch.poll()
    assert "changed after it was uploaded: it is kept anew" in watch.said
    assert watch.committed()["checkpoint-1"] == 2
    assert watch.fetched("checkpoint-1") == {**SMALL, "late": b"late"}


def test_a_file_that_comes_during_the_deletion_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 0})
    folder = watch.out / "checkpoint-1"
    write(folder, SMALL)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path == folder:
            write(folder, {"late": b"late"})
            (folder / "model.bin").write_bytes(b"n" * 5000)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    watch.poll()
    assert content(folder) == {"late": b"late", "model.bin": b"n" * 5000}
    assert "changed after it was uploaded: what did stays" in watch.said
    assert watch.fetched("checkpoint-1") == SMALL


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 0})
    outside = tmp_path / "outside"
    write(outside, {"secret": b"s"})
    write(watch.out / "checkpoint-1", SMALL)
    (watch.out / "checkpoint-1/away").symlink_to(outside)
    watch.poll()
    assert watch.fetched() == SMALL
    assert not watch.told("removed")
    assert watch.said == ["away is no file of it and not kept: it is not deleted"]
    assert content(outside) == {"secret": b"s"}


@pytest.mark.parametrize(
    ("link", "target", "out"),
    [
        ("a", "b/c", False),
        ("d/a", "../b", False),
        ("a", "../b", True),
        ("d/a", "../../b", True),
        ("a", "/b", True),
        ("a", "b/../c", True),
        ("a", "", True),
    ],
)
def test_where_a_link_leads(link: str, target: str, out: bool) -> None:
    assert leads_out(link, target) is out


def test_a_restart_knows_what_was_committed_and_sends_nothing(watch: Watch, tmp_path: Path) -> None:
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    before = content(tmp_path / "store")
    watch.restart(delete=True, keep=0)
    watch.poll()
    assert content(tmp_path / "store") == before
    assert watch.told("removed") == ["checkpoint-1"]


def test_what_was_fetched_is_known_and_not_kept_twice(watch: Watch, tmp_path: Path) -> None:
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    before = content(tmp_path / "store")
    other = Watch(tmp_path, {"out": "back"})
    assert watch.fetched() == SMALL
    other.poll()
    assert other.told("known") == ["checkpoint-1"]
    assert not other.told("uploaded")
    assert not other.told("committed")
    assert content(tmp_path / "store") == before


def test_a_folder_that_is_written_again_is_a_new_version(watch: Watch) -> None:
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    write(watch.out / "checkpoint-1", {"model.bin": b"other"})
    watch.poll()
    assert watch.committed() == {"checkpoint-1": 2}
    assert watch.fetched() == {**SMALL, "model.bin": b"other"}


def test_a_flipped_byte_is_found_and_an_older_one_is_taken(watch: Watch, tmp_path: Path) -> None:
    for step in (1, 2):
        write(watch.out / f"checkpoint-{step}", SMALL)
    watch.poll()
    piece = next((tmp_path / "store/run/watched/data/checkpoint-2").rglob("*.bin"))
    flipped = bytearray(piece.read_bytes())
    flipped[3] ^= 1
    piece.write_bytes(flipped)
    assert watch.fetched() == SMALL
    assert not (tmp_path / "back/checkpoint-2").exists()
    for commit in (tmp_path / "store/run/watched/commits").rglob("*.json"):
        commit.write_bytes(commit.read_bytes().replace(b"checkpoint-", b"checkpoint+"))
    with pytest.raises(NothingUsable):
        watch.fetched(into="elsewhere")


def test_nothing_kept_is_not_the_same_as_no_answer(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.fetched() is None
    with pytest.raises(ObjectMissing, match="checkpoint-7"):
        watch.fetched("checkpoint-7")

    def fail(*_: object) -> None:
        raise StoreUnavailable("503")

    monkeypatch.setattr(DirectoryStore, "list", fail)
    with pytest.raises(StoreUnavailable):
        watch.fetched()


def test_a_store_that_fails_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 0})
    write(watch.out / "checkpoint-1", SMALL)
    real = DirectoryStore.upload

    def fail(*_: object) -> None:
        raise StoreUnavailable("503 SlowDown")

    monkeypatch.setattr(DirectoryStore, "upload", fail)
    watch.poll()
    assert content(watch.out / "checkpoint-1") == SMALL
    assert watch.said == ["503 SlowDown; tried again"]
    monkeypatch.setattr(DirectoryStore, "upload", real)
    watch.poll()
    assert watch.told("removed") == ["checkpoint-1"]


def test_a_store_that_took_other_bytes_is_noticed_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 0})
    write(watch.out / "checkpoint-1", SMALL)
    real = DirectoryStore.upload

    def upload(store: DirectoryStore, key: str, parts: Any, crc64: int) -> Any:
        done = real(store, key, parts, crc64)
        path = tmp_path / "store" / key
        path.write_bytes(b"x" + path.read_bytes()[1:])
        return done

    monkeypatch.setattr(DirectoryStore, "upload", upload)
    watch.poll()
    assert not watch.told("committed")
    assert content(watch.out / "checkpoint-1") == SMALL
    assert "CRC" in watch.said[0]


def test_a_folder_is_committed_when_the_parts_of_all_nodes_are_in(tmp_path: Path) -> None:
    log = tmp_path / "attempts"
    attempts.note(log, 1, 2)
    one, two = (Watch(tmp_path, node_rules(tmp_path, node, log)) for node in "ab")
    write(one.out / "checkpoint-1", {"rank-0": b"zero", "config": b"c"})
    write(two.out / "checkpoint-1", {"rank-1": b"one", "config": b"c"})
    one.poll()
    assert one.said == ["1 of 2 nodes have their part in the store"]
    assert not one.committed()
    two.poll()
    one.poll()
    assert one.told("committed") == two.told("committed") == ["checkpoint-1"]
    assert one.committed() == {"checkpoint-1": 1}
    assert one.fetched(node="a") == {"rank-0": b"zero", "config": b"c"}
    whole = {"rank-0": b"zero", "rank-1": b"one", "config": b"c"}
    assert one.fetched(node="new", into="third") == whole


def test_parts_of_two_attempts_are_never_one_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "attempts"
    attempts.note(log, 1, 2)
    one, two = (Watch(tmp_path, node_rules(tmp_path, node, log)) for node in "ab")
    write(one.out / "checkpoint-1", {"rank-0": b"first"})
    one.poll()
    attempts.note(log, 2, 2)
    write(two.out / "checkpoint-1", {"rank-1": b"second"})
    two.poll()
    one.poll()
    assert not one.committed()
    write(one.out / "checkpoint-1", {"rank-0": b"second"})
    one.poll()
    assert one.committed() == {"checkpoint-1": 1}
    assert one.fetched(node="c") == {"rank-0": b"second", "rank-1": b"second"}


def test_what_nobody_can_date_is_not_taken_for_one_of_this_attempt(tmp_path: Path) -> None:
    log = tmp_path / "attempts"
    watch = Watch(tmp_path, node_rules(tmp_path, "a", log))
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    assert "before the first attempt" in watch.said[0]
    assert not watch.told("uploaded")


def test_of_two_that_watch_one_folder_the_second_waits_until_the_first_is_gone(
    tmp_path: Path,
) -> None:
    one, two = Watch(tmp_path, {"shared": True}), Watch(tmp_path, {"shared": True, "node": "b"})
    write(one.out / "checkpoint-1", SMALL)
    one.poll()
    two.poll()
    assert one.told("committed") == ["checkpoint-1"]
    assert not two.events
    one.watching.close()
    two.poll()
    assert two.told("known") == ["checkpoint-1"]
    assert two.committed() == {"checkpoint-1": 1}


def test_folders_that_are_not_one_are_not_kept_as_one(tmp_path: Path) -> None:
    one = Watch(tmp_path, {"shared": True})
    two = Watch(tmp_path, {"shared": True, "out": "another"})
    one.poll()
    with pytest.raises(OtherFolder, match="another name"):
        two.poll()


def test_a_list_names_what_is_kept(watch: Watch, tmp_path: Path) -> None:
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    rows = verbs.rows(DirectoryStore(tmp_path / "store"), NAME)
    assert [(row["entry"], row["nbytes"], row["nodes"]) for row in rows] == [
        ("checkpoint-1", 5017, ["a"])
    ]
    assert "checkpoint-1" in verbs.table(rows)


def _part(**changes: Any) -> bytes:
    file = {"path": "a", "nbytes": 1, "crc64": 5, "mtime_ns": 1, "mode": 0o644}
    raw = {
        "entry": "checkpoint-1",
        "node": "",
        "attempt": 0,
        "single": False,
        "files": [{**file, **changes.pop("file", {})}],
        "folders": [],
        "links": [],
        "pieces": [{"nbytes": 1, "crc64": 5}],
    }
    return seal("everstep-watched-part/1", {**raw, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"file": {"path": "../a"}},
        {"file": {"path": "/a"}},
        {"file": {"path": "b//a"}},
        {"file": {"nbytes": 1 << 61}},
        {"file": {"mode": 0o4755}},
        {"entry": "../x"},
        {"folders": ["a"]},
        {"folders": ["a/b"]},
        {"links": [["a", "b"]]},
        {"links": [["x", "../y"]]},
        {"links": [["x", "b/../../y"]]},
        {"pieces": [{"nbytes": 1 << 50, "crc64": 5}]},
        {"pieces": []},
        {"single": True},
        {"single": 1},
        {"more": 1},
    ],
)
def test_a_hostile_part_is_refused(changes: dict[str, Any]) -> None:
    assert Part.unpack(_part()).files[0].path == "a"
    with pytest.raises(ManifestInvalid):
        Part.unpack(_part(**changes))


def test_no_two_names_become_one_key() -> None:
    odd = ["", "=", "a=b", "a%b", "..", "=2e=2e", "\udcff", "a" * 250, "a" * 251]
    assert len({names.quoted(name) for name in odd}) == len(odd)
    assert documents.PIECE == 4096
