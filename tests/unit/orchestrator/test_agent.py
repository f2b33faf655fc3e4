"""A whole agent in this process, with real ranks, and a desk that gives it orders."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.agent.loop import Agent
from orchestrator.core.events import RankExited, RanksGone, RanksStarted, Staged
from orchestrator.process_id import start_time
from orchestrator.supervisor.sessions import Sessions
from orchestrator.wire import (
    Control,
    Fact,
    Hello,
    OrderBody,
    Outcome,
    ReservePort,
    Shutdown,
    StartNode,
    StopNode,
    Welcome,
)
from tests.unit.orchestrator.desk import Desk, run_config, until

T = TypeVar("T")

SLEEPS = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(600)"]
STAGES = """
from checkpointing import Checkpointer
import numpy as np, os
ck = Checkpointer.from_env()
state = {"w": np.ones(8)}
ck.restore(state)
ck.finish(7, state)
os._exit(0)
"""
START = StartNode(
    attempt=1,
    node_rank=0,
    num_nodes=1,
    ranks=2,
    master_addr="127.0.0.1",
    master_port=1,
    restore=None,
    interval_steps=0,
)
STOP = StopNode(attempt=1, planned=False, stop_step=-1, save_s=0.0, grace_s=5.0)


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Office(Desk):
    """A desk with one agent in front of it."""

    task: "asyncio.Future[None]"
    agent: Any

    def make_sessions(self) -> Sessions:
        made = super().make_sessions()
        made._facts = self._take
        return made

    def _take(self, hello: Hello, fact: Fact) -> None:
        self.facts.append(fact)
        self.sessions.ack(hello.node, hello.incarnation, fact.n)

    async def orders(self, key: str, body: OrderBody, epoch: int = 1) -> Outcome:
        return await self.sessions.order("n0", key, epoch, body, 20.0)

    def facts_of(self, kind: type[T]) -> list[T]:
        return [fact.event for fact in self.facts if isinstance(fact.event, kind)]


@asynccontextmanager
async def office(
    folder: Path, command: Sequence[str] = SLEEPS, **tables: Any
) -> AsyncIterator[Office]:
    config = run_config(folder, list(command), **tables)
    node_dir = config.nodes.memory_dir / "n0"
    node_dir.mkdir(exist_ok=True)
    desk = Office(config.run_dir)
    agent = Agent(config, "n0", node_dir, "127.0.0.1")
    async with desk:
        desk.agent = agent
        desk.task = asyncio.ensure_future(agent.run())
        try:
            await until(lambda: desk.hellos)
            yield desk
        finally:
            agent.shut_down()
            await asyncio.wait_for(desk.task, 30)
            assert not node_dir.exists()


async def started(desk: Office, order: StartNode = START) -> tuple[int, ...]:
    """Start an attempt; return the ranks' pids."""
    before = len(desk.facts_of(RanksStarted))
    outcome = await desk.orders(f"start/{order.attempt}", order)
    assert outcome.ok, outcome
    await until(lambda: len(desk.facts_of(RanksStarted)) > before)
    return desk.facts_of(RanksStarted)[-1].pids


async def said_something(desk: Office, rank: int = 0) -> str:
    """Wait for a rank's first line of output."""
    log = desk.run_dir / "logs" / "attempt-0001" / f"rank-{rank:05d}.log"
    await until(lambda: log.exists() and log.read_text().endswith("\n"))
    return log.read_text()


def is_alive(pid: int) -> bool:
    return start_time(pid) is not None


def test_ranks_are_started_watched_and_reaped(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            pids = await started(desk)
            assert len(set(pids)) == 2
            await said_something(desk, 1)
            os.kill(pids[1], signal.SIGKILL)
            await until(lambda: desk.facts_of(RankExited))
            (ended,) = desk.facts_of(RankExited)
            assert (ended.rank, ended.code, ended.ours) == (1, -signal.SIGKILL, False)
            assert ended.last_line == "here"
            assert is_alive(pids[0])
            await desk.orders("stop/1", STOP)
            await until(lambda: desk.facts_of(RanksGone))
            stopped = desk.facts_of(RankExited)[1]
            assert (stopped.rank, stopped.code, stopped.ours) == (0, -signal.SIGTERM, True)
            assert not any(map(is_alive, pids))

    play(main())


def test_output_goes_to_one_file_per_attempt_and_rank(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path, [sys.executable, "-c", "print('hello')"]) as desk:
            await started(desk)
            await until(lambda: len(desk.facts_of(RankExited)) == 2)
            for rank in (0, 1):
                path = desk.run_dir / "logs" / "attempt-0001" / f"rank-{rank:05d}.log"
                assert path.read_text().endswith(f"[{rank}] hello\n")

    play(main())


class Forgetful(Sessions):
    """Loses the first outcome together with the connection."""

    lost = False

    def _receive(self, session: Any, text: str) -> None:
        if '"is":"Outcome"' in text and not self.lost:
            self.lost = True
            self.closing = asyncio.ensure_future(session.socket.close())
            return
        super()._receive(session, text)


def test_an_order_whose_outcome_was_lost_is_not_carried_out_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.orchestrator.desk.Sessions", Forgetful)

    async def main() -> None:
        async with office(tmp_path) as desk:
            desk.welcome = Welcome(epoch=1, acked=0, attempt=1)
            outcome = await desk.orders("start/1", START)
            assert outcome.ok
            assert isinstance(desk.sessions, Forgetful)
            assert desk.sessions.lost
            assert len(desk.hellos) == 2
            await until(lambda: desk.facts_of(RanksStarted))
            assert len({fact.n for fact in desk.facts}) == 1
            assert all(map(is_alive, desk.facts_of(RanksStarted)[0].pids))

    play(main())


def test_an_older_supervisor_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            assert (await desk.orders("a", ReservePort(attempt=1), epoch=3)).ok
            refused = await desk.orders("start/1", START, epoch=2)
            assert not refused.ok
            assert "epoch 2 is over, 3 is in force" in refused.detail
            assert not desk.facts_of(RanksStarted)

    play(main())


def test_the_epoch_of_a_welcome_counts_as_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            desk.welcome = Welcome(epoch=5, acked=0, attempt=0)
            await desk.agent._connection.introduce_again()
            await until(lambda: len(desk.hellos) == 2)
            assert not (await desk.orders("a", ReservePort(attempt=1), epoch=4)).ok

    play(main())


def test_an_attempt_is_started_once_and_never_after_a_later_one_or_its_own_stop(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            assert (await desk.orders("stop/2", replace(STOP, attempt=2))).ok
            await until(lambda: desk.facts_of(RanksGone))
            assert desk.facts_of(RanksGone) == [RanksGone(attempt=2, node="n0")]
            for attempt in (1, 2):
                refused = await desk.orders(f"late/{attempt}", replace(START, attempt=attempt))
                assert "not newer than 2" in refused.detail
            first = await started(desk, replace(START, attempt=3))
            assert not (await desk.orders("another key", replace(START, attempt=3))).ok
            assert all(map(is_alive, first))

    play(main())


def test_a_stop_in_the_middle_of_a_start_leaves_no_rank(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            ranks = desk.agent._ranks
            start_one, begun = ranks._start_one, asyncio.Event()

            async def slowly(*of: Any) -> None:
                await start_one(*of)
                begun.set()
                await asyncio.sleep(0.2)

            ranks._start_one = slowly
            start = asyncio.ensure_future(desk.orders("start/1", START))
            await begun.wait()
            assert (await desk.orders("stop/1", STOP)).ok
            await until(lambda: desk.facts_of(RanksGone))
            assert not ranks.running
            await start
            assert not ranks.running
            assert isinstance(desk.facts[-1].event, RanksGone), "the last word on the attempt"

    play(main())


def test_a_new_attempt_ends_the_ranks_of_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            first = await started(desk)
            second = await started(desk, replace(START, attempt=2))
            assert not any(map(is_alive, first))
            assert all(map(is_alive, second))

    play(main())


def test_ranks_of_an_attempt_that_is_over_are_ended_and_the_agent_says_hello_again(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            pids = await started(desk)
            desk.welcome = Welcome(epoch=2, acked=0, attempt=2)
            await desk.agent._connection.introduce_again()
            await until(lambda: len(desk.hellos) == 3)
            assert [hello.attempt for hello in desk.hellos] == [0, 1, 0]
            assert not any(map(is_alive, pids))

    play(main())


def test_ranks_of_the_live_attempt_are_left_alone_by_the_next_supervisor(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            pids = await started(desk)
            desk.welcome = Welcome(epoch=2, acked=0, attempt=1)
            await desk.agent._connection.introduce_again()
            await until(lambda: len(desk.hellos) == 2)
            await until(lambda: desk.reports)
            assert all(map(is_alive, pids))
            assert not desk.facts_of(RankExited)

    play(main())


@pytest.mark.parametrize(
    ("command", "word"),
    [(["/nonexistent/program"], "No such file"), (["/etc/passwd"], "Permission denied")],
)
def test_a_program_that_cannot_be_started_is_an_exit_of_every_rank(
    tmp_path: Path, command: list[str], word: str
) -> None:
    async def main() -> None:
        async with office(tmp_path, command) as desk:
            assert (await desk.orders("start/1", START)).ok
            await until(lambda: len(desk.facts_of(RankExited)) == 2)
            exits = desk.facts_of(RankExited)
            assert [(exit_.rank, exit_.code) for exit_ in exits] == [(0, 127), (1, 127)]
            assert all(word in exit_.last_line for exit_ in exits)
            assert not desk.facts_of(RanksStarted)

    play(main())


def test_what_a_rank_staged_is_told_before_its_end(tmp_path: Path) -> None:
    """Otherwise a run could be finished without its last checkpoint, unseen by anybody."""

    async def main() -> None:
        async with office(tmp_path, [sys.executable, "-c", STAGES]) as desk:
            await started(desk, replace(START, ranks=1))
            await until(lambda: desk.facts_of(RankExited))
            kinds = [type(fact.event) for fact in desk.facts]
            assert kinds == [RanksStarted, Staged, RankExited]
            (staged,) = desk.facts_of(Staged)
            assert [(shard.rank, shard.step) for shard in staged.shards] == [(0, 7)]

    play(main())


def test_a_port_is_held_for_one_attempt_and_can_be_listened_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            first = await desk.orders("1/port", ReservePort(attempt=1))
            again = await desk.orders("1/port again", ReservePort(attempt=1))
            second = await desk.orders("2/port", ReservePort(attempt=2))
            assert first.detail == again.detail != second.detail
            server = await asyncio.start_server(
                lambda *_: None, "127.0.0.1", int(second.detail), reuse_address=True
            )
            server.close()
            await server.wait_closed()

    play(main())


def test_an_order_that_fails_in_an_unknown_way_is_answered_with_it(tmp_path: Path) -> None:
    """Without an answer the supervisor waits, and then blames a node that it cannot reach."""

    async def main() -> None:
        async with office(tmp_path) as desk:
            desk.agent._address = "192.0.2.1"  # no address of this machine
            outcome = await desk.orders("port/1", ReservePort(attempt=1))
            assert not outcome.ok
            assert "Cannot assign requested address" in outcome.detail

    play(main())


def test_control_of_another_attempt_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            await started(desk)
            order = Control(attempt=1, interval_steps=5, effective_step=20)
            assert (await desk.orders("c", order)).ok
            refused = await desk.orders("d", replace(order, attempt=2))
            assert (refused.ok, refused.detail) == (False, "no ranks of attempt 2 here")
            control = desk.agent._ranks._ranks[0].slot.control()
            assert (control.interval_steps, control.effective_step) == (5, 20)
            assert control.snapshot_step == -1

    play(main())


def test_an_agent_that_is_told_to_leave_answers_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with office(tmp_path) as desk:
            pids = await started(desk)
            assert (await desk.orders("bye", Shutdown(grace_s=1.0))).ok
            await asyncio.wait_for(desk.task, 30)
            assert not any(map(is_alive, pids))

    play(main())


def test_an_agent_without_a_supervisor_ends_its_ranks_at_last(tmp_path: Path) -> None:
    times = {"heartbeat_s": 0.1, "agent_lost_s": 0.2, "supervisor_lost_s": 1.0}

    async def main() -> None:
        async with office(tmp_path, timeouts=times) as desk:
            pids = await started(desk)
            await desk.server.stop()
            await asyncio.wait_for(desk.task, 30)
            assert not any(map(is_alive, pids))

    play(main())


def test_the_connection_ends_behind_everything_else(tmp_path: Path) -> None:
    """The supervisor takes its end for the agent's; a new run may then use the same memory."""

    async def main() -> None:
        store = tmp_path / "store"
        store.mkdir()
        async with office(tmp_path, checkpoint={"store": store.as_uri()}) as desk:
            await started(desk)
            node_dir = desk.agent._node_dir
            uploads = desk.agent._uploads
            stop = uploads._stop

            async def slow_stop() -> None:
                await stop()
                await asyncio.sleep(0.3)

            uploads._stop = slow_stop
            await desk.orders("bye", Shutdown(grace_s=1.0))
            await until(lambda: desk.left)
            assert not node_dir.exists()

    play(main())


def test_a_killed_agent_takes_its_ranks_along(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG: nobody is left to watch them."""
    code = (
        "import asyncio, os, sys; from pathlib import Path;"
        "from orchestrator.agent.process import RankProcess\n"
        "async def main():\n"
        f"    p = await RankProcess.start({tuple(SLEEPS)!r}, os.environ, Path('/'))\n"
        "    print(p.pid, flush=True)\n"
        "    await p.output.read(1)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == -signal.SIGKILL
        await until(lambda: not is_alive(int(out)))

    play(main())


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_children_of_a_rank_end_with_it(tmp_path: Path, how: str) -> None:
    code = (
        "import subprocess, sys, time;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid,"
        " flush=True); time.sleep(600)"
    )

    async def main() -> None:
        async with office(tmp_path, [sys.executable, "-c", code]) as desk:
            (pid,) = await started(desk, replace(START, ranks=1))
            child = int((await said_something(desk)).split()[-1])
            assert is_alive(child)
            if how == "stopped":
                await desk.orders("stop/1", STOP)
            else:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: desk.facts_of(RankExited))
            await until(lambda: not is_alive(child))

    play(main())


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )

    async def main() -> None:
        async with office(tmp_path, [sys.executable, "-c", code]) as desk:
            await started(desk, replace(START, ranks=1))
            await said_something(desk)
            await desk.orders("stop/1", replace(STOP, grace_s=0.2))
            await until(lambda: desk.facts_of(RankExited))
            (ended,) = desk.facts_of(RankExited)
            assert (ended.code, ended.ours) == (-signal.SIGKILL, True)

    play(main())


def test_a_pipe_held_open_by_a_grandchild_does_not_hold_back_the_exit(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True).pid, flush=True); os._exit(3)"
    )

    async def main() -> None:
        async with office(tmp_path, [sys.executable, "-c", code]) as desk:
            began = time.monotonic()
            await started(desk, replace(START, ranks=1))
            await until(lambda: desk.facts_of(RankExited))
            (ended,) = desk.facts_of(RankExited)
            os.kill(int(ended.last_line), signal.SIGKILL)
            assert ended.code == 3
            assert ended.age_s <= time.monotonic() - began

    play(main())
