"""What restores, lists, verifies and deletes when the line, the server or the credentials fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import Checkpointer, restoring, rows, sources
from checkpointing.content import content_sha256
from checkpointing.deletion import delete_commit
from checkpointing.errors import CommitRefused, RestoreFailed
from checkpointing.resolver import find_commit, list_commits
from checkpointing.restore import Point, restore_from_store
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.verify import verify
from tests.faults.proxy import (
    Delay,
    Fault,
    FaultProxy,
    Flip,
    LoseAnswer,
    Reset,
    Rule,
    Say,
    Throttle,
    Truncate,
    expired_token,
    internal_error,
    skewed_clock,
    slow_down,
)
from tests.unit.checkpointing.ranks import Rank
from tests.unit.checkpointing.saved import save

pytestmark = [pytest.mark.s3, pytest.mark.slow]
RUN, WORLD = "run", 2
LARGE = 40_000  # doubles, read in pieces of 64 KiB here
EVER = 10**6

PASSING: dict[str, Callable[[], Fault]] = {
    "delay": lambda: Delay(0.3),
    "500": internal_error,
    "503": slow_down,
    "409": lambda: Say(409, "OperationAborted"),
    "reset": Reset,
    "lost": LoseAnswer,
    "truncated": lambda: Truncate(20),
    "token": expired_token,
    "skewed": lambda: skewed_clock(1200),
    "wrong": lambda: Flip(150),
}
KEYS = (r"commits/", r"rank-00001\.json", r"\.bin")
BRIEF = {("wrong", key) for key in KEYS} | {("truncated", KEYS[1]), ("token", KEYS[2])}


def marks(*, brief: bool) -> list[pytest.MarkDecorator]:
    """All of them run with the whole loops, the brief ones everywhere."""
    return [pytest.mark.chaos, pytest.mark.brief] if brief else [pytest.mark.chaos]


def each(*brief: str) -> pytest.MarkDecorator:
    found = [pytest.param(name, marks=marks(brief=name in brief)) for name in PASSING]
    return pytest.mark.parametrize("name", found)


def state(_: int, step: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"model": {"w": rng.random(4000), "b": rng.random(3)}, "large": np.arange(float(LARGE))}


def empty() -> dict[str, Any]:
    return {"model": {"w": np.zeros(4000), "b": np.zeros(3)}, "large": np.zeros(LARGE)}


@pytest.fixture
def plain(direct: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Two commits, reached without the proxy."""
    monkeypatch.setattr(sources, "_SMALL", 1 << 16)
    monkeypatch.setattr(rows, "_LONGEST", 1 << 16)
    store = open_store(direct)
    for step in (1, 2):
        save(store, RUN, step, state=lambda rank, step=step: state(rank, step), world=WORLD)
    return store


def restored(store: ObjectStore, step: int) -> bool:
    found, local = empty(), {"rng": np.zeros(4, np.int64)}
    restore_from_store(store, RUN, Point(step=step, attempt=1), 1, WORLD, found, local)
    wanted = state(1, step)
    same = [np.array_equal(found["model"][name], wanted["model"][name]) for name in ("w", "b")]
    return all(same) and np.array_equal(found["large"], wanted["large"]) and local["rng"][0] == 1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(name, key, marks=marks(brief=(name, key) in BRIEF), id=f"{name}-{key[:5]}")
        for name in PASSING
        for key in KEYS
    ],
)
def test_a_restore_goes_through_every_passing_fault(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, name: str, key: str
) -> None:
    rule = Rule(PASSING[name](), "GetObject", key)
    proxy.script(rule)
    assert restored(open_store(behind), 2)
    assert rule.hits == 1


@each("wrong", "lost")
def test_finding_and_verifying_go_through_every_passing_fault(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, name: str
) -> None:
    store = open_store(behind)
    sound = content_sha256(plain, RUN, 2)
    for operation, key in (("ListObjectsV2", "commits"), ("GetObject", "commits")):
        proxy.script(rule := Rule(PASSING[name](), operation, key))
        if name == "wrong" and operation == "ListObjectsV2":
            continue  # a list has no sum: what it says is read and judged
        assert [commit.step for commit in list_commits(store, RUN)] == [2, 1]
        assert rule.hits == 1
    proxy.script(rule := Rule(PASSING[name](), "GetObject", r"\.bin"))
    assert verify(store, find_commit(plain, RUN, 2)).problems == ()
    assert rule.hits == 1
    proxy.script(Rule(PASSING[name](), "GetObject", r"\.bin"))
    assert content_sha256(store, RUN, 2) == sound


def test_bytes_that_arrive_wrong_again_and_again_are_refused_and_named(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy
) -> None:
    store = open_store(behind)
    for key, named in (
        (r"commits/", "step-000000000002"),
        (r"rank-00001\.json", "rank-00001.json"),
        (r"rank-0000\d\.bin", "bytes in run/data/"),
    ):
        proxy.script(Rule(Flip(150), "GetObject", key, times=EVER))
        with pytest.raises(RestoreFailed, match=named):
            restored(store, 2)
    proxy.script(Rule(Flip(150), "GetObject", "step-000000000002", times=EVER))
    assert [commit.step for commit in list_commits(store, RUN)] == [1]
    problems = verify(store, find_commit(plain, RUN, 2)).problems
    assert any("step-000000000002" in problem for problem in problems)
    proxy.script()
    assert restored(store, 2), "nothing is held against it that its line did"


@each("wrong", "skewed")
def test_a_commit_goes_through_every_passing_fault(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, name: str
) -> None:
    store = open_store(behind)
    for attempt, operation in enumerate(("GetObject", "HeadObject", "PutObject"), start=1):
        if name in ("truncated", "wrong") and operation == "HeadObject":
            continue  # it has no body
        key = r"commits/" if operation == "PutObject" else "step-000000000003"
        proxy.script(rule := Rule(PASSING[name](), operation, key))
        outcome = save(store, RUN, 3, attempt, state=lambda _: {"w": np.arange(9.0)}, world=1)
        assert outcome.committed, operation
        assert rule.hits == 1, operation
        assert content_sha256(plain, RUN, 3, attempt)["all"]


def test_an_index_that_arrives_wrong_is_never_committed(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(Flip(150), "GetObject", r"rank-00000\.json", times=EVER))
    with pytest.raises(CommitRefused, match=r"rank-00000\.json"):
        save(open_store(behind), RUN, 3, state=state, world=WORLD)
    proxy.script(Rule(Flip(150, of_request=True), "PutObject", r"commits/", times=EVER))
    with pytest.raises(Exception, match="commits/"):
        save(open_store(behind), RUN, 4, state=state, world=WORLD)
    assert [commit.step for commit in list_commits(plain, RUN)] == [2, 1]


@each("lost")
def test_a_deletion_goes_through_every_passing_fault(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, name: str
) -> None:
    store = open_store(behind)
    before = [info.key for info in plain.list(f"{RUN}/")]
    for operation in ("PutObject", "DeleteObject", "GetObject"):
        save(plain, RUN, 3, state=lambda _: {"w": np.arange(9.0)}, world=WORLD)
        proxy.script(rule := Rule(PASSING[name](), operation))
        assert delete_commit(store, RUN, 3, 1) > 0
        assert rule.hits == 1, operation
        assert [info.key for info in plain.list(f"{RUN}/")] == before


def test_a_restore_over_a_line_of_5_mb_s_arrives(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    small = open_store(behind)
    save(plain, RUN, 3, state=lambda _: {"w": np.arange(500_000.0)}, world=1)
    proxy.script(Rule(Throttle(5e6), times=EVER))
    found = {"w": np.zeros(500_000)}
    restore_from_store(small, RUN, Point(step=3, attempt=1), 0, 1, found, None)
    assert np.array_equal(found["w"], np.arange(500_000.0))


def test_a_rank_waits_for_a_server_that_is_too_busy(
    behind: StoreConfig,
    plain: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(tmp_path)
    rank.store = behind
    busy = Rule(slow_down(), times=EVER)
    proxy.script(busy)
    monkeypatch.setattr("checkpointing.heartbeat.TermGuard.install", lambda _: None)
    monkeypatch.setattr(restoring, "_say_away", lambda _: proxy.script())
    spec = {"step": 2, "attempt": 1, "source": "store"}
    more = {"WORLD_SIZE": str(WORLD), "EVERSTEP_RUN": RUN, "EVERSTEP_STEP_TIMEOUT_S": "60"}
    found = empty()
    assert Checkpointer.from_env(rank.environ(2, spec, **more)).restore(found) == 2
    assert busy.hits > 1
    assert np.array_equal(found["large"], state(0, 2)["large"])
