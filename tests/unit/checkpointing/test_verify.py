"""One flipped byte anywhere in any object is found, named, and fallen back from."""

from pathlib import Path

import numpy as np
import pytest

from checkpointing import keys
from checkpointing import verify as verifying
from checkpointing.errors import ManifestInvalid, RestoreFailed, StoreUnavailable
from checkpointing.quarantine import quarantine
from checkpointing.resolver import find_commit, list_commits
from checkpointing.restore import Point, restore_from_store
from checkpointing.sharded import Sharded
from checkpointing.store.directory import DirectoryStore
from checkpointing.verify import Verified, verify
from tests.unit.checkpointing.saved import save, store_at

WORLD = 2


def state(rank: int) -> dict[str, object]:
    rng = np.random.default_rng(1)
    piece = np.random.default_rng(rank).random((3, 5))
    return {
        "model": {"w": rng.random((4, 3)), "b": rng.random(3).astype("f4"), "none": np.empty(0)},
        "experts": Sharded(local=piece, shape=(6, 5), start=(3 * rank, 0)),
        "epoch": 3,
    }


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = store_at(tmp_path / "store")
    save(store, "run", 1, state=state, world=WORLD)
    save(store, "run", 2, state=state, world=WORLD)
    return store


def check(store: DirectoryStore, step: int = 2) -> Verified:
    return verify(store, find_commit(store, "run", step))


def restore_newest(store: DirectoryStore) -> int:
    """Restore as ranks and supervisor do: the newest, and on failure quarantine and the next."""
    for commit in list_commits(store, "run"):
        point = Point(step=commit.step, attempt=commit.attempt)
        try:
            for rank in range(WORLD):
                local = {"rng": np.zeros(4, np.int64)}
                restore_from_store(store, "run", point, rank, WORLD, state(rank), local)
        except RestoreFailed as error:
            quarantine(store, "run", *commit.place, why=str(error), who="test")
            continue
        return commit.step
    raise AssertionError("nothing to restore")


def test_a_sound_checkpoint_is_read_to_its_last_byte(store: DirectoryStore) -> None:
    found = check(store)
    assert found.problems == ()
    assert found.nbytes == 4 * 3 * 8 + 3 * 4 + 2 * 3 * 5 * 8 + 2 * 4 * 8


def test_every_flipped_byte_is_found_and_named_and_fallen_back_from(
    store: DirectoryStore, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    data = sorted((root / keys.data_prefix("run", 2, 1)).iterdir())
    manifest = root / keys.manifest_key("run", 2, 1)
    seen = 0
    for path in (*data, manifest):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 1 if path.suffix == ".bin" else 7):
            content[at] ^= 1 << at % 8
            path.write_bytes(content)
            problems = check(store).problems
            assert problems, (path.name, at)
            assert path.name in " ".join(problems), (path.name, at)
            if at % 5 == 0:
                assert restore_newest(store) == 1
                (root / keys.quarantine_key("run", 2, 1)).unlink(missing_ok=True)
            content[at] ^= 1 << at % 8
            seen += 1
        path.write_bytes(content)
    assert seen > 500
    assert check(store).problems == ()
    assert restore_newest(store) == 2


def test_the_broken_tensor_is_named(store: DirectoryStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / keys.data_key("run", 2, 1, 1)
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    (problem,) = check(store).problems
    assert problem.startswith("experts: bytes 0 to 119 of run/data/")
    assert check(store, 1).problems == ()


def test_lost_short_and_long_objects_are_named(store: DirectoryStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / keys.data_key("run", 2, 1, 1)
    content = path.read_bytes()
    for changed in (content[:-1], content + b"x"):
        path.write_bytes(changed)
        (problem,) = check(store).problems
        assert "bytes, " in problem
    path.unlink()
    assert "does not exist" in check(store).problems[0]
    (tmp_path / "store" / keys.index_key("run", 2, 1, 0)).unlink()
    assert any("rank-00000.json: does not exist" in problem for problem in check(store).problems)


def test_large_extents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_PIECE", 1000)
    store = store_at(tmp_path / "store")
    save(store, "run", 2, state=lambda _: {"w": np.arange(999.0), "v": np.arange(3.0)}, world=1)
    sizes: list[int] = []
    real = store.read_into

    def spy(key: str, offset: int, out: memoryview) -> None:
        sizes.append(out.nbytes)
        real(key, offset, out)

    monkeypatch.setattr(store, "read_into", spy)
    assert check(store).problems == ()
    assert max(sizes) <= 1000
    assert sum(sizes) == 999 * 8 + 3 * 8 + 32
    path = tmp_path / "store" / keys.data_key("run", 2, 1, 0)
    content = bytearray(path.read_bytes())
    content[4321] ^= 1
    path.write_bytes(content)
    assert check(store).problems[0].startswith("w: ")


def test_a_store_without_an_answer_is_no_damage(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(key: str, offset: int, out: memoryview) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(store, "read_into", fails)
    with pytest.raises(StoreUnavailable):
        check(store)


def test_a_manifest_that_claims_more_than_is_there_takes_no_memory(
    store: DirectoryStore, tmp_path: Path
) -> None:
    from checkpointing.content import content_sha256

    path = tmp_path / "store" / keys.data_key("run", 2, 1, 1)
    path.write_bytes(path.read_bytes()[:8])
    with pytest.raises(ManifestInvalid, match="has 8 bytes"):
        content_sha256(store, "run", 2)
