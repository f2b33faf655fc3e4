import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.commit import CommitOutcome
from checkpointing.errors import CommitRefused, StoreUnavailable
from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Action,
    Commit,
    Fetch,
    Finish,
    GiveBack,
    Launch,
    NoteNode,
    Outcome,
    Pair,
    Restore,
    SetInterval,
    Snapshot,
    Source,
    StartRanks,
    StopRanks,
    Unhold,
    Wait,
)
from orchestrator.core.events import Event, ShardUploaded
from orchestrator.core.ledger import Entry, NodeIncident
from orchestrator.core.node import Allocation, AllocationPhase, Node
from orchestrator.core.policy import Policy
from orchestrator.core.saves import SaveCost
from orchestrator.core.state import Attempt, AttemptPhase, Pending, State
from orchestrator.errors import LedgerUnavailable
from orchestrator.launch.launcher import AllocationSpec, LaunchUnknownError
from orchestrator.supervisor import execute
from orchestrator.supervisor.execute import Context, Executor
from orchestrator.wire import (
    Buddy,
    Control,
    FetchedRank,
    FetchNode,
    OrderBody,
    ReservePort,
    Shutdown,
    StartNode,
    StopNode,
)
from orchestrator.wire import Outcome as Answer
from tests.contract.fake_launcher import FakeLauncher
from tests.unit.orchestrator.desk import until


class Ears:
    """Agents that answer at once, or never."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, int, OrderBody]] = []
        self.refusing: set[str] = set()
        self.gone: list[tuple[str, ...]] = []
        self.late: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def order(
        self, node: str, key: str, epoch: int, body: OrderBody, timeout_s: float
    ) -> Answer:
        await self.gate.wait()
        self.orders.append((node, key, epoch, body))
        if node in self.refusing:
            return Answer(key=key, ok=False, detail=f"{node} did not answer")
        return Answer(key=key, ok=True, detail="29500" if isinstance(body, ReservePort) else "")

    def all(self) -> tuple[Any, ...]:
        return tuple(self.late)

    async def all_gone(self, nodes: tuple[str, ...], timeout_s: float) -> None:
        self.gone.append(nodes)


class Notes:
    """A ledger that remembers, or is out of reach."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.problem = ""

    def note(self, entry: Entry) -> None:
        if self.problem:
            raise LedgerUnavailable(self.problem)
        self.entries.append(entry)


def node(name: str, **changes: Any) -> Node:
    return Node(
        name=name,
        incarnation="i1",
        alive=changes.get("alive", True),
        address=f"10.0.0.{name[1:]}",
        metrics_url="",
        joined_seq=1,
        job=changes.get("job", ""),
    )


def allocation(job: str) -> Allocation:
    phase = AllocationPhase.RUNNING if job else AllocationPhase.ASKED
    return Allocation(key=f"key of {job}", nodes=3, asked_at=0.0, seq=1, job=job, phase=phase)


def under_way(**changes: Any) -> State:
    attempt = Attempt(
        number=2,
        nodes=("n0", "n1"),
        ranks_per_node=4,
        restore=None,
        phase=AttemptPhase.RUNNING,
        ordered_at=0.0,
        ordered_seq=1,
        max_step=40,
    )
    shard = {
        "attempt": 2,
        "step": 30,
        "world": 2,
        "index_crc64": 1,
        "nbytes": 1,
        "upload_s": 1.0,
    }
    shards = {rank: ShardUploaded(rank=rank, index_key=f"k{rank}", **shard) for rank in (0, 1)}
    return State(
        policy=Policy(budget={}, kill_grace_s=3.0, stop_save_s=9.0),
        epoch=5,
        allocations=(allocation("7"),),
        attempt=attempt,
        nodes={"n0": node("n0"), "n1": node("n1"), "n2": node("n2", alive=False)},
        uploads={(30, 2): shards},
        **changes,
    )


class Bench:
    """An executor with ears and a launcher, and what it emits."""

    def __init__(
        self, state: State, *, ahead: int = 7, store: Any = None, cost: SaveCost | None = None
    ) -> None:
        self.ears = Ears()
        self.launcher = FakeLauncher()
        self.emitted: list[Event] = []
        spec = AllocationSpec(key="", name="big", nodes=0, gpus_per_node=8, run_dir=Path("/r"))
        context = Context(
            state=lambda: state,
            step_ahead=lambda: ahead,
            emit=self.emitted.append,
            cost_of=lambda _: cost,
        )
        ears: Any = self.ears
        self.ledger = Notes()
        ledger: Any = self.ledger
        self.executor = Executor(ears, self.launcher, store, ledger, spec, context)

    async def does(self, action: Action, key: str = "big/2/do/1") -> ev.ActionDone:
        self.executor.start(Pending(key=key, action=action, seq=1, at=0.0))
        await until(lambda: key not in self.executor._running)
        done = self.emitted[-1]
        assert isinstance(done, ev.ActionDone)
        assert done.key == key
        return done


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


START = StartRanks(attempt=3, nodes=("n1", "n0"), ranks_per_node=4, restore=None, interval_steps=10)


def test_ranks_are_started_on_every_node_with_one_port_of_the_first() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        assert (await bench.does(START, "k")).ok
        port, *starts = bench.ears.orders
        assert port[:3] == ("n1", "k/port", 5)
        assert [(name, key, epoch) for name, key, epoch, _ in starts] == [
            ("n1", "k/n1", 5),
            ("n0", "k/n0", 5),
        ]
        bodies = [body for *_, body in starts if isinstance(body, StartNode)]
        assert [body.node_rank for body in bodies] == [0, 1]
        assert {(b.master_addr, b.master_port, b.num_nodes) for b in bodies} == {
            ("10.0.0.1", 29_500, 2)
        }

    play(main())


def test_what_ranks_lack_is_brought_before_any_of_them_starts() -> None:
    async def main() -> None:
        state = under_way()
        state.nodes["n1"] = replace(state.nodes["n1"], replica_address="n1:7")
        bench = Bench(state)
        fetches = (Fetch(rank=5, nodes=("n1",), disks=("n0",)),)
        restore = Restore(step=30, attempt=2, source=Source.PEER, fetches=fetches)
        start = replace(START, restore=restore)
        assert (await bench.does(start, "k")).ok
        node, key, _, body = bench.ears.orders[0]
        assert (node, key) == ("n0", "k/fetch/n0")
        assert isinstance(body, FetchNode)
        assert body.ranks == (FetchedRank(rank=5, sources=("n1:7", "disk")),)
        assert len(bench.ears.orders) == 4
        bench.ears.refusing, bench.ears.orders = {"n0"}, []
        assert not (await bench.does(start)).ok
        assert len(bench.ears.orders) == 1, "no port, no ranks"

    play(main())


def test_nodes_are_told_where_their_copies_go() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        assert (await bench.does(Pair(attempt=2, buddies={"n0": "b:1", "n1": "c:2"}), "k")).ok
        assert [(name, key, body) for name, key, _, body in bench.ears.orders] == [
            ("n0", "k/n0", Buddy(attempt=2, address="b:1")),
            ("n1", "k/n1", Buddy(attempt=2, address="c:2")),
        ]

    play(main())


def test_an_agent_that_does_not_start_its_ranks_is_told_by_name() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        bench.ears.refusing = {"n0"}
        done = await bench.does(START)
        assert (done.ok, done.detail) == (False, "n0 did not answer")
        bench.ears.refusing = {"n1"}
        bench.ears.orders.clear()
        bench.emitted.clear()
        assert not (await bench.does(START)).ok
        assert len(bench.ears.orders) == 1, "nobody starts without a port"

    play(main())


@pytest.mark.parametrize(("ahead", "step"), [(90, 90), (7, 42)])
def test_a_stop_is_for_a_step_that_is_ahead_of_all_ranks(ahead: int, step: int) -> None:
    async def main() -> None:
        bench = Bench(under_way(), ahead=ahead)
        assert (await bench.does(StopRanks(attempt=2, nodes=("n0", "n1"), planned=True))).ok
        for *_, body in bench.ears.orders:
            assert body == StopNode(
                attempt=2, planned=True, stop_step=step, save_s=9.0, grace_s=3.0
            )

    play(main())


@pytest.mark.parametrize(("ahead", "step"), [(90, 90), (7, 50)])
def test_a_snapshot_and_a_new_interval_are_never_behind_a_rank(ahead: int, step: int) -> None:
    async def main() -> None:
        bench = Bench(under_way(), ahead=ahead)
        assert (await bench.does(Snapshot(attempt=2, step=50))).ok
        change = SetInterval(
            attempt=2,
            interval_steps=20,
            effective_step=50,
            previous_steps=10,
            goodput=0.9,
            binding="",
            inputs={},
        )
        bench.emitted.clear()
        assert (await bench.does(change)).ok
        bodies = [body for *_, body in bench.ears.orders if isinstance(body, Control)]
        assert [body.snapshot_step for body in bodies] == [step, step, -1, -1]
        assert [body.effective_step for body in bodies] == [-1, -1, step, step]
        assert [body.interval_steps for body in bodies] == [-1, -1, 20, 20]

    play(main())


def test_an_attempt_that_is_over_gets_no_more_orders() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        done = await bench.does(Snapshot(attempt=1, step=50))
        assert (done.ok, done.detail) == (False, "attempt 1 is over")
        assert not bench.ears.orders

    play(main())


def test_an_action_that_is_under_way_is_not_begun_twice() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        bench.ears.gate.clear()
        pending = Pending(key="k", action=Snapshot(attempt=2, step=50), seq=1, at=0.0)
        bench.executor.start(pending)
        bench.executor.start(pending)
        await asyncio.sleep(0.01)
        bench.ears.gate.set()
        await asyncio.sleep(0.05)
        assert len(bench.ears.orders) == 2
        assert len(bench.emitted) == 1

    play(main())


def test_a_launch_has_the_decisions_key_and_shape() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        first = await bench.does(Launch(nodes=3), "big/0/launch/1")
        bench.emitted.clear()
        again = await bench.does(Launch(nodes=3), "big/0/launch/1")
        assert first == again
        assert bench.launcher.allocations() == 1
        bench.launcher.refusal = "no such partition"
        bench.emitted.clear()
        refused = await bench.does(Launch(nodes=3), "big/0/launch/2")
        assert (refused.ok, refused.detail) == (False, "no such partition")

    play(main())


def test_an_end_tells_the_living_agents_and_gives_the_allocation_back() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        assert (await bench.does(Finish(outcome=Outcome.FINISHED), "k")).ok
        assert [(name, type(body)) for name, _, _, body in bench.ears.orders] == [
            ("n0", Shutdown),
            ("n1", Shutdown),
        ]
        assert bench.ears.gone == [("n0", "n1"), ()]

    play(main())


def test_an_agent_that_comes_back_while_the_run_ends_is_told_as_well() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        bench.ears.late = [SimpleNamespace(hello=SimpleNamespace(node="n2"))]
        assert (await bench.does(Finish(outcome=Outcome.FINISHED), "k")).ok
        assert [name for name, *_ in bench.ears.orders] == ["n0", "n1", "n2"]

    play(main())


@pytest.mark.parametrize("job", ["7", ""])
def test_an_allocation_is_given_back_also_when_asking_for_it_failed(job: str) -> None:
    async def main() -> None:
        bench = Bench(replace(under_way(), allocations=(allocation(job),)))
        given_back: list[str] = []
        bench.launcher.cancel = given_back.append  # type: ignore[method-assign]
        assert (await bench.does(Finish(outcome=Outcome.FAILED))).ok
        assert given_back == ([job, ""] if job else [""])

    play(main())


def test_all_allocations_are_given_back_at_the_end() -> None:
    async def main() -> None:
        gone = replace(allocation("6"), phase=AllocationPhase.GONE)
        bench = Bench(replace(under_way(), allocations=(gone, allocation("7"), allocation("8"))))
        given_back: list[str] = []
        bench.launcher.cancel = given_back.append  # type: ignore[method-assign]
        assert (await bench.does(Finish(outcome=Outcome.FINISHED))).ok
        assert sorted(given_back) == ["", "7", "8"]

    play(main())


def test_only_the_agents_of_an_allocation_leave_before_it_is_given_back() -> None:
    async def main() -> None:
        nodes = {"n0": node("n0", job="7"), "n1": node("n1", job="8")}
        bench = Bench(replace(under_way(), nodes=nodes))
        given_back: list[str] = []
        bench.launcher.cancel = given_back.append  # type: ignore[method-assign]
        assert (await bench.does(GiveBack(job="8"), "k")).ok
        assert [(name, key) for name, key, *_ in bench.ears.orders] == [("n1", "k/n1")]
        assert bench.ears.gone == [("n1",)]
        assert given_back == ["8"]

    play(main())


def test_a_launcher_without_an_answer_is_asked_again_under_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No answer is no refusal: the request may have come through."""
    monkeypatch.setattr(execute, "FIRST_PAUSE_S", 0.01)

    async def main() -> None:
        bench = Bench(under_way())
        asked: list[str] = []

        def submit(spec: AllocationSpec) -> str:
            asked.append(spec.key)
            if len(asked) < 4:
                raise LaunchUnknownError("Slurm does not answer")
            return "9"

        bench.launcher.submit = submit  # type: ignore[method-assign]
        assert (await bench.does(Launch(nodes=2), "k")).detail == "9"
        assert asked == ["k"] * 4

    play(main())


def test_a_launch_names_the_nodes_that_are_not_wanted() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        wanted: list[AllocationSpec] = []

        def submit(spec: AllocationSpec) -> str:
            wanted.append(spec)
            return "9"

        bench.launcher.submit = submit  # type: ignore[method-assign]
        assert (await bench.does(Launch(nodes=2, exclude=("n5",)), "k")).detail == "9"
        assert [(s.key, s.nodes, s.exclude) for s in wanted] == [("k", 2, ("n5",))]

    play(main())


def test_a_held_allocation_is_let_go_or_the_refusal_is_told() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        let_go: list[tuple[str, tuple[str, ...]]] = []
        bench.launcher.unhold = lambda job, exclude: let_go.append((job, tuple(exclude)))  # type: ignore[method-assign]
        assert (await bench.does(Unhold(job="7", exclude=("n5",)))).ok
        assert let_go == [("7", ("n5",))]
        del bench.launcher.unhold
        assert (await bench.does(Unhold(job="7"), "again")).detail == "7 is not held"

    play(main())


def test_an_incident_is_noted_at_the_time_of_the_decision() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        incident = NoteNode(node="n1", incident=4, fault="gpu", cause="fell off", excluded_s=9.0)
        assert (await bench.does(incident)).ok
        expected = NodeIncident(
            at=0.0,
            node="n1",
            run="big",
            incident=4,
            fault="gpu",
            cause="fell off",
            excluded_s=9.0,
        )
        assert bench.ledger.entries == [expected]
        bench.ledger.problem = "no space left"
        assert (await bench.does(incident, "again")).detail == "no space left"

    play(main())


def test_an_end_waits_for_the_launch_that_it_must_undo() -> None:
    """Agents that start behind the end would wait a day for a supervisor."""

    async def main() -> None:
        bench = Bench(replace(under_way(), allocations=()))
        gate, given_back = threading.Event(), []
        submit = bench.launcher.submit

        def slowly(spec: AllocationSpec) -> str:
            gate.wait(30)
            return submit(spec)

        bench.launcher.submit = slowly  # type: ignore[method-assign]
        bench.launcher.cancel = given_back.append  # type: ignore[method-assign]
        bench.executor.start(Pending(key="l", action=Launch(nodes=3), seq=1, at=0.0))
        ending = asyncio.ensure_future(bench.does(Finish(outcome=Outcome.STOPPED), "f"))
        await asyncio.sleep(0.1)
        assert not given_back
        gate.set()
        assert (await ending).ok
        assert given_back == ["fake-1", ""]

    play(main())


def test_an_agent_that_does_not_answer_does_not_hold_back_the_end() -> None:
    async def main() -> None:
        bench = Bench(under_way())
        bench.ears.refusing = {"n0", "n1"}
        assert (await bench.does(Finish(outcome=Outcome.FAILED))).ok

    play(main())


@pytest.mark.parametrize(
    ("answer", "events", "detail"),
    [
        (
            CommitOutcome(committed=True, already=False, manifest_key="m", nbytes=9, why=""),
            [ev.CheckpointCommitted(step=30, attempt=2, manifest_key="m", nbytes=9)],
            "m",
        ),
        (
            CommitOutcome(committed=False, already=True, manifest_key="m", nbytes=0, why="other"),
            [ev.CommitRefused(step=30, attempt=2, why="other")],
            "other",
        ),
        (
            CommitRefused("tensor w: rank 0 against rank 1"),
            [ev.CommitRefused(step=30, attempt=2, why="tensor w: rank 0 against rank 1")],
            "tensor w: rank 0 against rank 1",
        ),
        (StoreUnavailable("no answer"), [], "no answer"),
    ],
    ids=["committed", "taken", "refused", "unanswered"],
)
def test_a_commit_is_told_as_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, answer: Any, events: list[Event], detail: str
) -> None:
    asked: list[Any] = []

    def commit(*args: Any, **more: Any) -> Any:
        asked.append((args, more))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(execute, "commit", commit)

    async def main() -> None:
        bench = Bench(under_way(), store="the store")
        done = await bench.does(Commit(step=30, attempt=2))
        assert bench.emitted[:-1] == events
        assert done.detail == detail
        (args, more) = asked[0]
        assert args[:4] == ("the store", "big", 30, 2)
        assert [record.index_key for record in args[4]] == ["k0", "k1"]
        assert more == {"world": 2, "write_id": "big/2/commit/30", "tokens": None}

    play(main())


def test_a_commit_tells_what_its_save_cost_and_the_manifest_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = SaveCost(ranks=2, tokens=4096, stall_s=0.1)
    told: list[Any] = []
    outcome = CommitOutcome(committed=True, already=False, manifest_key="m", nbytes=9, why="")
    monkeypatch.setattr(execute, "commit", lambda *_, **more: told.append(more) or outcome)

    async def main() -> None:
        bench = Bench(under_way(), store="the store", cost=cost)
        await bench.does(Commit(step=30, attempt=2))
        assert told[0]["tokens"] == 4096
        (committed,) = bench.emitted[:-1]
        assert isinstance(committed, ev.CheckpointCommitted)
        assert committed.cost == cost

    play(main())


def test_a_commit_whose_end_alone_was_not_written_down_is_not_done_again() -> None:
    """The supervisor was killed between the two records; there is nothing left to commit."""

    async def main() -> None:
        bench = Bench(under_way(), store="the store")
        done = await bench.does(Commit(step=20, attempt=2))
        assert (done.ok, done.detail) == (True, "settled before")
        assert bench.emitted == [done]

    play(main())


def test_what_goes_wrong_unexpectedly_is_an_outcome_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        bench = Bench(under_way())
        monkeypatch.setattr(bench.launcher, "submit", lambda _: 1 / 0)
        done = await bench.does(Launch(nodes=1))
        assert (done.ok, done.detail) == (False, "ZeroDivisionError: division by zero")

    play(main())


def test_effects_that_are_under_way_at_the_end_have_no_outcome() -> None:
    """The next supervisor takes them up from the journal."""

    async def main() -> None:
        bench = Bench(under_way())
        bench.ears.gate.clear()
        action = Snapshot(attempt=2, step=50)
        bench.executor.start(Pending(key="k", action=action, seq=1, at=0.0))
        await asyncio.sleep(0)
        await bench.executor.close()
        assert not bench.emitted

    play(main())


def test_waiting_needs_nothing_done() -> None:
    async def main() -> None:
        assert (await Bench(under_way()).does(Wait())).ok

    play(main())
