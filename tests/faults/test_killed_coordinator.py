"""kill -9 of who commits, deletes, sweeps or puts aside, at every request; and two at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from checkpointing import keys
from checkpointing.content import content_sha256
from checkpointing.quarantine import list_quarantined
from checkpointing.resolver import list_commits
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from tests.faults.proxy import FaultProxy, Hold, Rule
from tests.unit.checkpointing.saved import save, upload, weights

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(900)]
RUN, WORLD = "run", 2
LONGEST_S = 60.0


class Coordinator:
    """A process that carries out orders, each in a child that may be killed."""

    def __init__(self, store: StoreConfig) -> None:
        self._store = store.to_json()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.coordinator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def start(self, **order: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"store": self._store, **order}) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def end(self) -> Any:
        """Wait for the end; return what came out, None from one that was killed."""
        answer = self._answer()
        assert answer["code"] in (0, -signal.SIGKILL), answer["out"]
        return answer["out"] if answer["code"] == 0 else None

    def do(self, **order: Any) -> Any:
        self.start(**order)
        return self.end()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture
def plain(direct: StoreConfig) -> ObjectStore:
    return open_store(direct)


@pytest.fixture
def coordinator(behind: StoreConfig) -> Iterator[Coordinator]:
    with Coordinator(behind) as running:
        yield running


def steps(store: ObjectStore) -> list[int]:
    """What a resolver says, every one of them whole to its last byte."""
    found = list_commits(store, RUN)
    for commit in found:
        assert content_sha256(store, RUN, *commit.place)["all"]
    return [commit.step for commit in found]


def left(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(f"{RUN}/")]


def points(proxy: FaultProxy, coordinator: Coordinator, order: dict[str, Any]) -> int:
    """Carry an order out in peace; return how many requests it took."""
    before = len(proxy.seen)
    assert coordinator.do(**order) is not None
    return len(proxy.seen) - before


def killed_at(
    proxy: FaultProxy, coordinator: Coordinator, order: dict[str, Any], number: int, *, after: bool
) -> bool:
    """Kill who carries an order out at one of its requests; False when it needed fewer."""
    hold = Hold(after_server=after)
    proxy.script(Rule(hold, skip=number))
    pid = coordinator.start(**order)
    is_held = hold.held.wait(5.0)
    if is_held:
        os.kill(pid, signal.SIGKILL)
    proxy.script()
    hold.release.set()
    assert coordinator.end() is None or not is_held
    return is_held


def every_point(
    proxy: FaultProxy,
    coordinator: Coordinator,
    prepare: Callable[[], dict[str, Any]],
    check: Callable[[dict[str, Any]], None],
    some: slice = slice(None),
) -> int:
    """Kill at each request, before and after the server did it, and look at what is left."""
    proxy.script()
    many, tried = points(proxy, coordinator, order := prepare()), 0
    check(order)
    every = [(number, after) for number in range(many) for after in (False, True)]
    for number, after in every[some]:
        order = prepare()
        tried += killed_at(proxy, coordinator, order, number, after=after)
        check(order)
    return tried


SOME = [
    pytest.param(slice(None), marks=pytest.mark.chaos, id="every"),
    pytest.param(slice(-1, None), id="last"),
]


@pytest.mark.parametrize("some", SOME)
def test_who_commits_is_killed(
    plain: ObjectStore, proxy: FaultProxy, coordinator: Coordinator, some: slice
) -> None:
    save(plain, RUN, 1)
    committed = [1]

    def prepare() -> dict[str, Any]:
        step = committed[0] + 1
        records = upload(plain, RUN, step, state=lambda _: weights(step), world=WORLD)
        uploads = [
            {"rank": r.rank, "index_key": r.index_key, "index_crc64": r.index_crc64}
            for r in records
        ]
        return {"do": "commit", "step": step, "attempt": 1, "uploads": uploads, "write_id": "one"}

    def check(order: dict[str, Any]) -> None:
        newest = steps(plain)[0]
        assert newest in (order["step"] - 1, order["step"])
        outcome = coordinator.do(**order)  # the next coordinator decides the same
        assert outcome["committed"]
        assert steps(plain)[0] == order["step"]
        committed[0] = order["step"]

    assert every_point(proxy, coordinator, prepare, check, some)


@pytest.mark.parametrize("some", SOME)
def test_who_deletes_is_killed(
    plain: ObjectStore, proxy: FaultProxy, coordinator: Coordinator, some: slice
) -> None:
    save(plain, RUN, 1)
    kept = left(plain)

    def prepare() -> dict[str, Any]:
        assert save(plain, RUN, 2).committed
        return {"do": "delete", "step": 2, "attempt": 1}

    def check(order: dict[str, Any]) -> None:
        assert steps(plain) in ([1], [2, 1])
        coordinator.do(do="finish")
        if steps(plain) == [2, 1]:
            coordinator.do(**order)
        assert left(plain) == kept

    assert every_point(proxy, coordinator, prepare, check, some)


@pytest.mark.parametrize("some", SOME)
def test_who_sweeps_is_killed(
    plain: ObjectStore, proxy: FaultProxy, coordinator: Coordinator, some: slice
) -> None:
    save(plain, RUN, 5)

    def open_one(step: int) -> None:
        client, prefix = plain._s3.client(), plain._s3.prefix  # type: ignore[attr-defined]
        client.create_multipart_upload(
            Bucket=plain._s3.bucket,  # type: ignore[attr-defined]
            Key=prefix + keys.data_key(RUN, step, 3, 0),
        )

    def prepare() -> dict[str, Any]:
        upload(plain, RUN, 3, 1)
        open_one(2), open_one(3)
        time.sleep(1.1)  # the store counts whole seconds
        newest = max((commit.step for commit in list_commits(plain, RUN)), default=5)
        assert save(plain, RUN, newest + 1).committed  # what lies there is older than it
        return {"do": "sweep"}

    def check(order: dict[str, Any]) -> None:
        found = steps(plain)
        coordinator.do(**order)
        assert steps(plain) == found
        assert plain.open_uploads("") == ()
        assert not [key for key in left(plain) if "data/step-000000000003" in key]

    assert every_point(proxy, coordinator, prepare, check, some)


@pytest.mark.parametrize("some", SOME)
def test_who_puts_aside_is_killed(
    plain: ObjectStore, proxy: FaultProxy, coordinator: Coordinator, some: slice
) -> None:
    save(plain, RUN, 1)
    save(plain, RUN, 2)

    def prepare() -> dict[str, Any]:
        coordinator.do(do="lift", step=2, attempt=1)
        return {"do": "quarantine", "step": 2, "attempt": 1}

    def check(order: dict[str, Any]) -> None:
        assert steps(plain) in ([1], [2, 1])
        coordinator.do(**order)
        assert steps(plain) == [1]
        assert [record.place for record in list_quarantined(plain, RUN)] == [(2, 1)]

    assert every_point(proxy, coordinator, prepare, check, some)


def test_two_coordinators_that_race_make_one_commit(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, coordinator: Coordinator
) -> None:
    with Coordinator(behind) as other:
        for step in range(1, 9):
            uploads = [
                {"rank": r.rank, "index_key": r.index_key, "index_crc64": r.index_crc64}
                for r in upload(plain, RUN, step, state=lambda _, step=step: weights(step))
            ]
            order = {"do": "commit", "step": step, "attempt": 1, "uploads": uploads}
            begun = len(proxy.seen)
            both = (coordinator, other)
            for one, name in zip(both, ("one", "other"), strict=True):
                one.start(**order, write_id=name)
            outcomes = [one.end() for one in both]
            puts = [seen.status for seen in proxy.seen[begun:] if seen.operation == "PutObject"]
            assert sorted(puts) == [200, 412], "one was first"
            assert [outcome["committed"] for outcome in outcomes] == [True, True]
            assert sorted(outcome["already"] for outcome in outcomes) == [False, True]
        assert steps(plain) == list(range(8, 0, -1))


def test_two_attempts_that_race_are_two_commits_and_the_later_one_counts(
    behind: StoreConfig, plain: ObjectStore, coordinator: Coordinator
) -> None:
    with Coordinator(behind) as other:
        for step in range(1, 4):
            both = (coordinator, other)
            for attempt, one in enumerate(both, start=1):
                (record,) = upload(plain, RUN, step, attempt, world=1)
                uploads = [
                    {"rank": 0, "index_key": record.index_key, "index_crc64": record.index_crc64}
                ]
                order = {"do": "commit", "step": step, "uploads": uploads, "write_id": "w"}
                one.start(**order, attempt=attempt)
            assert [one.end()["committed"] for one in both] == [True, True]
            assert list_commits(plain, RUN)[0].place == (step, 2)
