from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpointing import keys
from checkpointing.checksum import crc64
from checkpointing.commit import CommitOutcome, UploadRecord, commit
from checkpointing.content import content_sha256
from checkpointing.errors import (
    CheckpointDamaged,
    CommitRefused,
    ManifestInvalid,
    NothingUsable,
    ObjectMissing,
    RestoreFailed,
    StoreMissing,
    StoreUnavailable,
)
from checkpointing.manifest import Index, read_manifest
from checkpointing.resolver import find_commit, list_commits
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send

WORLD = 3


class Cluster:
    """Three ranks in one process."""

    def __init__(self, folder: Path) -> None:
        root = folder / "store"
        root.mkdir()
        self.store = DirectoryStore(root)
        self.root = root
        self.folder = folder
        self.touch: dict[int, Callable[[dict[str, object]], object]] = {}

    def arena(self, rank: int) -> Path:
        return self.folder / f"arena-{rank}"

    def state(self, step: int) -> dict[str, object]:
        rng = np.random.default_rng(step)
        return {
            "model": {f"w{i}": rng.random((50, i + 1)) for i in range(5)},
            "optimizer": {"m": rng.random(3_000_000).astype(np.float32), "lr": 0.1, "k": {0: 1}},
            "epoch": step,
        }

    def upload(self, step: int, attempt: int = 1) -> list[UploadRecord]:
        records = []
        for rank in range(WORLD):
            state = self.state(step)
            if rank in self.touch:
                self.touch[rank](state)
            stager = Stager(self.arena(rank), attempt=attempt, rank=rank, world=WORLD)
            stager.stage(step, state, {"rng": np.full(4, rank)})
            arena = MappedArena(self.arena(rank))
            sent = send(self.store, "run", arena, arena.staged()[0])
            arena.close()
            records.append(
                UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=sent.index_crc64)
            )
        return records

    def commit(
        self,
        uploads: Sequence[UploadRecord],
        step: int,
        attempt: int = 1,
        write_id: str = "w",
        tokens: int | None = None,
    ) -> CommitOutcome:
        return commit(self.store, "run", step, attempt, uploads, WORLD, write_id, tokens=tokens)

    def rewrite(self, record: UploadRecord, **changes: object) -> UploadRecord:
        """Put another index in the place of a rank's."""
        index = replace(Index.unpack(self.store.get(record.index_key)), **changes)  # type: ignore[arg-type]
        self.store.delete(record.index_key)
        packed = index.pack()
        self.store.put_if_absent(record.index_key, packed)
        return replace(record, index_crc64=crc64(packed))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_commit_is_listed_and_restores_bit_for_bit(cluster: Cluster) -> None:
    outcome = cluster.commit(cluster.upload(5), 5)
    assert outcome.committed
    assert not outcome.already
    assert [(c.step, c.attempt) for c in list_commits(cluster.store, "run")] == [(5, 1)]
    manifest = read_manifest(cluster.store, outcome.manifest_key)
    assert manifest.nbytes == outcome.nbytes == sum(s.data_nbytes for s in manifest.shards)
    state, local = cluster.state(0), {"rng": np.zeros(4, np.int64)}
    restore_from_store(cluster.store, "run", Point(step=5, attempt=1), 2, WORLD, state, local)
    wanted = cluster.state(5)
    assert repr(state) == repr(wanted)
    assert np.array_equal(state["optimizer"]["m"], wanted["optimizer"]["m"])  # type: ignore[index]
    assert local["rng"].tolist() == [2] * 4


def test_a_manifest_tells_the_tokens_when_somebody_told_them(cluster: Cluster) -> None:
    told = cluster.commit(cluster.upload(5), 5, tokens=40_960)
    untold = cluster.commit(cluster.upload(6), 6)
    assert read_manifest(cluster.store, told.manifest_key).tokens == 40_960
    assert read_manifest(cluster.store, untold.manifest_key).tokens is None
    assert b"tokens" not in cluster.store.get(untold.manifest_key)  # as those before this field


def test_commits_are_listed_newest_first_and_foreign_keys_are_ignored(cluster: Cluster) -> None:
    for step in (5, 10, 20):
        cluster.commit(cluster.upload(step), step)
        for rank in range(WORLD):
            cluster.arena(rank).unlink()
    cluster.store.put_if_absent("run/commits/notes.txt", b"x")
    assert [c.step for c in list_commits(cluster.store, "run")] == [20, 10, 5]
    assert list_commits(cluster.store, "other") == ()


def test_a_corrupt_manifest_is_no_commit(cluster: Cluster) -> None:
    outcome = cluster.commit(cluster.upload(5), 5)
    path = cluster.root / outcome.manifest_key
    path.write_bytes(path.read_bytes().replace(b'"world":3', b'"world":4'))
    with pytest.raises(NothingUsable, match="1 that cannot be read"):
        list_commits(cluster.store, "run")
    with pytest.raises(ManifestInvalid, match="CRC"):
        read_manifest(cluster.store, outcome.manifest_key)


def test_a_copied_manifest_is_no_commit_of_another_step(cluster: Cluster) -> None:
    outcome = cluster.commit(cluster.upload(5), 5)
    body = cluster.store.get(outcome.manifest_key)
    for run, step in (("run", 6), ("other", 5)):
        cluster.store.put_if_absent(keys.manifest_key(run, step, 1), body)
    assert [commit.step for commit in list_commits(cluster.store, "run")] == [5]
    with pytest.raises(NothingUsable):
        list_commits(cluster.store, "other")
    with pytest.raises(RestoreFailed, match="is a copy of"):
        restore_from_store(
            cluster.store, "run", Point(step=6, attempt=1), 0, WORLD, cluster.state(0), None
        )


def test_a_step_whose_manifest_is_spoilt_is_refused_and_not_overwritten(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    cluster.store.put_if_absent(keys.manifest_key("run", 5, 1), b"spoilt")
    with pytest.raises(CommitRefused, match="the key of the manifest is taken"):
        cluster.commit(uploads, 5)
    assert cluster.store.get(keys.manifest_key("run", 5, 1)) == b"spoilt"


def test_a_failed_listing_is_never_no_commits(cluster: Cluster) -> None:
    cluster.root.rename(cluster.folder / "moved")
    with pytest.raises(Exception, match="no such folder"):
        list_commits(cluster.store, "run")


def test_uploading_and_committing_again_changes_nothing(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    for rank in range(WORLD):
        arena = MappedArena(cluster.arena(rank))
        assert send(cluster.store, "run", arena, arena.staged()[0]).index_crc64 == (
            uploads[rank].index_crc64
        )
        arena.close()
    first = cluster.commit(uploads, 5)
    before = cluster.store.get(first.manifest_key)
    again = cluster.commit(uploads, 5)
    assert again.committed
    other = cluster.commit(uploads, 5, write_id="another")
    assert other.committed
    assert other.already
    assert cluster.store.get(first.manifest_key) == before


def test_a_step_is_committed_once_by_attempt_and_the_newest_counts(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    late = cluster.commit(cluster.upload(5, attempt=2), 5, attempt=2, write_id="x")
    assert late.committed
    assert not late.already
    assert [(c.step, c.attempt) for c in list_commits(cluster.store, "run")] == [(5, 2), (5, 1)]
    assert find_commit(cluster.store, "run", 5).attempt == 2
    for attempt in (1, 2):
        state, point = cluster.state(0), Point(step=5, attempt=attempt)
        restore_from_store(cluster.store, "run", point, 0, WORLD, state, None)
        assert repr(state) == repr(cluster.state(5))
    point = Point(step=5, attempt=3)
    with pytest.raises(RestoreFailed, match="attempt 3 is not committed"):
        restore_from_store(cluster.store, "run", point, 0, WORLD, cluster.state(0), None)


def test_two_writers_of_one_attempt_with_other_uploads_make_one_commit(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    cluster.commit(uploads, 5)
    changed = cluster.rewrite(uploads[1], local_skeleton={"t": "dict", "k": [], "v": []})
    outcome = cluster.commit([uploads[0], changed, uploads[2]], 5, write_id="x")
    assert not outcome.committed
    assert "from other uploads" in outcome.why


def test_a_manifest_under_its_old_key_is_still_read(cluster: Cluster) -> None:
    outcome = cluster.commit(cluster.upload(5), 5)
    body = cluster.store.get(outcome.manifest_key)
    old = keys.old_manifest_key("run", 5)
    cluster.store.put_if_absent(old, body)
    assert [c.key for c in list_commits(cluster.store, "run")] == [outcome.manifest_key]
    cluster.store.delete(outcome.manifest_key)
    assert [(c.attempt, c.key) for c in list_commits(cluster.store, "run")] == [(1, old)]
    _restore(cluster, cluster.state(0))
    point = Point(step=5, attempt=2)
    with pytest.raises(RestoreFailed, match="attempt 2 is not committed"):
        restore_from_store(cluster.store, "run", point, 0, WORLD, cluster.state(0), None)


def test_a_lost_answer_to_the_manifest_put_is_settled_by_reading(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = cluster.upload(5)
    real = cluster.store.put_if_absent

    def lands_and_loses(key: str, body: bytes) -> bool:
        real(key, body)
        raise StoreUnavailable("lost")

    monkeypatch.setattr(cluster.store, "put_if_absent", lands_and_loses)
    assert cluster.commit(uploads, 5).committed

    def never_lands(key: str, body: bytes) -> bool:
        raise StoreUnavailable("lost")

    cluster.store.delete(keys.manifest_key("run", 5, 1))
    monkeypatch.setattr(cluster.store, "put_if_absent", never_lands)
    with pytest.raises(StoreUnavailable):
        cluster.commit(uploads, 5)
    assert list_commits(cluster.store, "run") == ()


def _refused(cluster: Cluster, uploads: Sequence[UploadRecord], match: str) -> None:
    with pytest.raises(CommitRefused, match=match):
        cluster.commit(uploads, 5)
    assert list_commits(cluster.store, "run") == ()


def test_a_missing_rank_is_named(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    _refused(cluster, [uploads[0], uploads[2]], "no upload from rank 1 of 3")
    _refused(cluster, [*uploads, uploads[0]], "4 uploads for 3 ranks")


def test_replicas_that_differ_are_refused_naming_tensor_and_ranks(cluster: Cluster) -> None:
    def flip(state: dict[str, object]) -> None:
        state["model"]["w3"][4, 1] += 1e-9  # type: ignore[index]

    cluster.touch[1] = flip
    _refused(cluster, cluster.upload(5), r"model/w3: content differs: ranks 0, 2 against rank 1")


def test_python_values_that_differ_are_refused(cluster: Cluster) -> None:
    cluster.touch[2] = lambda state: state.update(epoch=99)
    _refused(cluster, cluster.upload(5), r"Python values .* rank 0 and rank 2")


def test_an_altered_index_is_refused(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    cluster.rewrite(uploads[1], world=4)
    _refused(cluster, uploads, "index of rank 1")


def test_an_index_of_another_step_is_refused(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    _refused(cluster, [*uploads[:2], cluster.rewrite(uploads[2], step=6)], "index of rank 2")


def test_chunks_must_cover_every_tensor_exactly_once(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    index = Index.unpack(cluster.store.get(uploads[0].index_key))
    for offset in (-1, 8):
        moved = [
            replace(e, offset=offset) if e.owner == 0 and e.kind == "replica" else e
            for e in index.extents
        ]
        changed = cluster.rewrite(uploads[0], extents=tuple(moved))
        _refused(cluster, [changed, *uploads[1:]], "rank")
    fewer = cluster.rewrite(uploads[0], extents=index.extents[1:])
    _refused(cluster, [fewer, *uploads[1:]], r"absent: rank 0|expected")


def test_own_state_that_nobody_uploaded_is_refused(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    index = Index.unpack(cluster.store.get(uploads[1].index_key))
    own = next(extent for extent in index.extents if extent.kind == "local")
    last = max(extent.offset + extent.nbytes for extent in index.extents if extent.offset >= 0)
    assert own.offset + own.nbytes == last
    extents = tuple(replace(e, offset=-1) if e == own else e for e in index.extents)
    uploads[1] = cluster.rewrite(uploads[1], extents=extents, data_nbytes=last - own.nbytes)
    with pytest.raises(CommitRefused, match="rng: own state of rank 1, uploaded by nobody"):
        cluster.commit(uploads, 5)


def test_a_lost_or_short_object_is_refused(cluster: Cluster) -> None:
    uploads = cluster.upload(5)
    path = cluster.root / keys.data_key("run", 5, 1, 1)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    _refused(cluster, uploads, "rank 1: .* bytes, not")
    path.unlink()
    _refused(cluster, uploads, "rank 1: .* does not exist")


def _restore(cluster: Cluster, state: dict[str, object], arena: Path | None = None) -> None:
    restore_from_store(cluster.store, "run", Point(step=5, attempt=1), 0, WORLD, state, None, arena)


def test_every_flipped_byte_in_the_store_is_found(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    for rank in range(WORLD):
        path = cluster.root / keys.data_key("run", 5, 1, rank)
        content = bytearray(path.read_bytes())
        for at in (0, len(content) // 2, len(content) - 33):
            content[at] ^= 0x10
            path.write_bytes(content)
            with pytest.raises(RestoreFailed, match="fail their CRC"):
                _restore(cluster, cluster.state(0))
            content[at] ^= 0x10
        path.write_bytes(content)
    _restore(cluster, cluster.state(0))


def test_the_own_arena_is_read_first_and_doubted(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    arena = MappedArena(cluster.arena(0))
    arena.data(arena.staged()[0].index)[3] ^= 1
    arena.close()
    state = cluster.state(0)
    _restore(cluster, state, cluster.arena(0))
    assert repr(state) == repr(cluster.state(5))
    with pytest.raises(RestoreFailed, match="in memory fail their CRC"):
        restore_from_memory(
            cluster.arena(0), Point(step=5, attempt=1), 0, WORLD, cluster.state(0), None
        )
    for rank in range(WORLD):  # nothing but the intact arena is left
        (cluster.root / keys.data_key("run", 5, 1, rank)).unlink()
    state, local = cluster.state(0), {"rng": np.zeros(4, np.int64)}
    restore_from_store(
        cluster.store, "run", Point(step=5, attempt=1), 1, WORLD, state, local, cluster.arena(1)
    )
    assert local["rng"].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (np.zeros((50, 4), np.float32), "model/w3: saved as ndarray float64 .*nothing is cast"),
        (np.zeros((50, 5)), r"model/w3: saved as .*\[50, 4\], the state has .*\[50, 5\]"),
        ("text", "model/w3"),
    ],
)
def test_another_dtype_or_shape_is_an_error_not_a_cast(
    cluster: Cluster, leaf: object, match: str
) -> None:
    cluster.commit(cluster.upload(5), 5)
    state = cluster.state(0)
    state["model"]["w3"] = leaf  # type: ignore[index]
    if isinstance(leaf, str):
        _restore(cluster, state)
        assert isinstance(state["model"]["w3"], np.ndarray)  # type: ignore[index]
        return
    with pytest.raises(RestoreFailed, match=match):
        _restore(cluster, state)


def test_an_object_that_casts_or_drops_is_found_out(cluster: Cluster) -> None:
    class Careless:
        def __init__(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
            self.change = change
            self.kept: dict[str, object] = {}

        def state_dict(self) -> dict[str, object]:
            return self.kept

        def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
            self.kept = {name: self.change(value) for name, value in state.items()}

    honest = Careless(lambda value: value.copy())
    honest.kept = {"x": np.arange(5.0)}
    for change, match in (
        (lambda value: value.copy(), ""),
        (lambda value: value.astype(np.float32), "nothing is cast"),
        (lambda value: value + 1, "changed it"),
        (lambda value: (value + 1)[::-1].copy()[::-1], "changed it"),
    ):
        stager = Stager(cluster.folder / "arena-x", attempt=1, rank=0, world=1)
        stager.stage(1, {"o": honest}, None)
        taker = Careless(change)
        arguments = (cluster.folder / "arena-x", Point(step=1, attempt=1), 0, 1, {"o": taker}, None)
        if match:
            with pytest.raises(RestoreFailed, match=match):
                restore_from_memory(*arguments)
        else:
            restore_from_memory(*arguments)
            assert taker.kept["x"].tolist() == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
        (cluster.folder / "arena-x").unlink()


@pytest.mark.torch
def test_a_tensor_that_cannot_be_written_to_is_a_failed_restore(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch")
    arena, point = cluster.folder / "arena-x", Point(step=1, attempt=1)
    Stager(arena, attempt=1, rank=0, world=1).stage(1, {"w": torch.arange(3.0)}, None)
    with pytest.raises(RestoreFailed, match="does not take"):
        restore_from_memory(arena, point, 0, 1, {"w": torch.zeros(1).expand(3)}, None)


@pytest.mark.parametrize("ending", [".bin", ".json"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_damage_in_the_store_is_told_from_what_is_not_its_fault(
    cluster: Cluster, ending: str, is_gone: bool
) -> None:
    cluster.commit(cluster.upload(5), 5)
    (path,) = (cluster.root / "run" / "data").rglob(f"rank-00001{ending}")
    if is_gone:
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    point = Point(step=5, attempt=1)
    with pytest.raises(CheckpointDamaged):
        restore_from_store(
            cluster.store, "run", point, 1, WORLD, cluster.state(0), {"rng": np.zeros(4, np.int64)}
        )


def test_a_state_that_does_not_fit_is_no_damage(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    state = {**cluster.state(0), "model": {"w0": np.zeros(3)}}
    with pytest.raises(RestoreFailed) as failed:
        restore_from_store(cluster.store, "run", Point(step=5, attempt=1), 1, WORLD, state, None)
    assert not isinstance(failed.value, CheckpointDamaged)


def test_what_is_not_committed_cannot_be_restored(cluster: Cluster) -> None:
    cluster.upload(5)
    with pytest.raises(StoreMissing, match="no commit at all"):
        _restore(cluster, cluster.state(0))
    cluster.commit(cluster.upload(5, attempt=2), 5, attempt=2)
    with pytest.raises(RestoreFailed, match="step 5 of attempt 1 is not committed"):
        _restore(cluster, cluster.state(0))


def test_own_state_is_not_given_to_another_world(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    state, point = cluster.state(0), Point(step=5, attempt=1)
    restore_from_store(cluster.store, "run", point, 7, 8, state, None)
    with pytest.raises(RestoreFailed, match="own state of 3 ranks, not 8"):
        restore_from_store(cluster.store, "run", point, 7, 8, state, {"rng": np.zeros(4)})


def test_the_content_sum_depends_on_content_only(cluster: Cluster) -> None:
    cluster.commit(cluster.upload(5), 5)
    cluster.commit(cluster.upload(6), 6)
    five = content_sha256(cluster.store, "run", 5)
    assert set(five) == {"weights", "optimizer", "all"}
    assert len(set(five.values())) == 3
    assert five["weights"] != content_sha256(cluster.store, "run", 6)["weights"]
    (cluster.folder / "other").mkdir()
    other = Cluster(cluster.folder / "other")
    other.commit(other.upload(5, attempt=4), 5, attempt=4)
    assert content_sha256(other.store, "run", 5) == five
    with pytest.raises(ObjectMissing):
        content_sha256(cluster.store, "run", 7)
