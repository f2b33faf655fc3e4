"""An agent as a task of a Slurm step, and the signals that Slurm sends to all of its processes."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import freeze
from orchestrator.core.events import (
    AgentWarned,
    RankExited,
    RanksStarted,
    ShardUploaded,
    Staged,
)
from orchestrator.process_id import start_time
from orchestrator.wire import Shutdown
from tests.unit.orchestrator.desk import run_config, until
from tests.unit.orchestrator.test_agent import START, Office, play
from tests.unit.orchestrator.test_agent import STOP as AT_ONCE

JOB = "7"
AGENT = "import sys; from orchestrator.agent.task import run_agent; run_agent(sys.argv[1])"
SAVES = """
import time
from checkpointing import Checkpointer
import numpy as np
ck = Checkpointer.from_env()
state = {"w": np.ones(8)}
step = ck.restore(state)
while not ck.should_stop:
    time.sleep(0.01)
    step += 1
    ck.step(step, state)
"""
STUCK_IN_C = """
import ctypes, os
from checkpointing import Checkpointer
ck = Checkpointer.from_env()
ck.restore({})
pipe, _ = os.pipe()
ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
"""
PLAIN = "import time; print('here', flush=True); time.sleep(3600)"
STOP = replace(AT_ONCE, grace_s=600.0)


class Node(Office):
    """A desk, and an agent in a process of its own."""

    process: asyncio.subprocess.Process

    def descendants(self) -> tuple[int, ...]:
        """The agent and what it has started: what Slurm signals."""
        found, new = {self.process.pid}, [self.process.pid]
        while new:
            with contextlib.suppress(OSError):
                for path in Path(f"/proc/{new.pop()}/task").glob("*/children"):
                    children = set(map(int, path.read_text().split())) - found
                    found |= children
                    new += children
        return tuple(sorted(found))

    def signal_step(self, signum: int) -> tuple[int, ...]:
        """Signal all processes as Slurm does, the agent last; return them."""
        pids = self.descendants()
        for pid in sorted(pids, key=lambda pid: pid == self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return pids

    async def starts(self, **changes: Any) -> tuple[int, ...]:
        assert (await self.orders("start/1", replace(START, **changes))).ok
        await until(lambda: self.facts_of(RanksStarted))
        return self.facts_of(RanksStarted)[0].pids

    async def trains(self, beyond: int = 0) -> int:
        """Wait until all ranks have got further than that; return where they are."""

        def steps() -> list[int]:
            return [rank.step for report in self.reports[-1:] for rank in report.ranks]

        await until(lambda: len(steps()) == 2 and min(steps()) > beyond)
        return max(steps())

    async def leaves(self) -> None:
        async with asyncio.timeout(60):
            assert await self.process.wait() == 0, self.log
        assert not any(map(is_alive, self.seen))
        assert not (self.run_dir.parent / "memory").exists() or not list(
            (self.run_dir.parent / "memory").iterdir()
        )

    @property
    def log(self) -> str:
        return (self.run_dir / "nodes" / "n0" / "agent.log").read_text()

    seen: tuple[int, ...] = ()


def is_alive(pid: int) -> bool:
    return start_time(pid) is not None


def warnings(node: Node) -> list[tuple[str, float]]:
    return [(warned.signal, warned.left_s) for warned in node.facts_of(AgentWarned)]


@asynccontextmanager
async def a_node(
    folder: Path,
    script: str,
    *,
    preload: Sequence[str] = (),
    slurm: bool = True,
    **timeouts: float,
) -> AsyncIterator[Node]:
    (folder / "job.py").write_text(script)
    store = folder / "store"
    store.mkdir()
    config = run_config(
        folder,
        [sys.executable, "job.py"],
        checkpoint={"store": store.as_uri()},
        timeouts={"heartbeat_s": 0.1, **timeouts},
    )
    job = config.job.model_copy(update={"preload": tuple(preload)})
    config = config.model_copy(update={"job": job})
    freeze(config, config.run_dir / "run.json")
    noted = config.run_dir / "submitit" / JOB
    noted.mkdir(parents=True)
    (noted / "job.json").write_text(json.dumps({"job": JOB, "key": "k"}))
    (noted / "nodes.json").write_text('["n0"]')
    env = {**os.environ, "SUBMITIT_LOCAL_GLOBALID": "0"}
    if slurm:
        env |= {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n0"}
    code = AGENT if slurm else AGENT.replace("argv[1]", f"argv[1], {JOB!r}")
    async with Node(config.run_dir) as node:
        node.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(config.run_dir), env=env
        )
        try:
            await until(lambda: node.hellos)
            yield node
        finally:
            if node.process.returncode is None:
                node.process.kill()
                await node.process.wait()


@pytest.mark.parametrize("preload", [(), ("numpy",)], ids=["exec", "zygote"])
def test_sigusr2_is_told_once_and_nothing_else_happens(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, preload=preload) as node:
            pids = await node.starts()
            step = await node.trains()
            signalled = node.signal_step(signal.SIGUSR2)
            assert len(signalled) == len(pids) + 2 + len(preload), "agent, uploader, zygote"
            await until(lambda: node.facts_of(AgentWarned))
            node.signal_step(signal.SIGUSR2)
            await node.trains(beyond=step + 20)
            assert node.descendants() == signalled
            assert warnings(node) == [("USR2", math.inf)]
            assert not node.facts_of(RankExited)

    play(main())


@pytest.mark.parametrize("preload", [(), ("numpy",)], ids=["exec", "zygote"])
def test_behind_sigterm_the_ranks_can_be_stopped_in_order_and_their_last_save_is_stored(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, preload=preload, leave_s=600.0) as node:
            await node.starts()
            await node.trains()
            node.seen = node.signal_step(signal.SIGTERM)
            await until(lambda: node.facts_of(AgentWarned))
            node.signal_step(signal.SIGTERM)
            step = await node.trains(beyond=20) + 50
            assert node.descendants() == node.seen
            stop = replace(STOP, planned=True, stop_step=step, save_s=60.0)
            assert (await node.orders("stop", stop)).ok
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            assert [exit_.code for exit_ in node.facts_of(RankExited)] == [0, 0]
            await until(lambda: len(node.facts_of(ShardUploaded)) == 2)
            assert {shard.step for shard in node.facts_of(ShardUploaded)} == {step}
            assert (await node.orders("bye", Shutdown(grace_s=1.0))).ok
            await node.leaves()
            assert warnings(node) == [("TERM", 600.0)], "the second one changes nothing"

    play(main())


@pytest.mark.parametrize("script", [SAVES, STUCK_IN_C], ids=["trains", "stuck in a library"])
def test_an_agent_whose_supervisor_does_nothing_leaves_in_time(tmp_path: Path, script: str) -> None:
    async def main() -> None:
        async with a_node(tmp_path, script, leave_s=6.0, kill_grace_s=4.0) as node:
            pids = await node.starts()
            await until(lambda: node.reports and len(node.reports[-1].ranks) == 2)
            began = time.monotonic()
            node.seen = node.signal_step(signal.SIGTERM)
            await until(lambda: node.facts_of(AgentWarned))
            assert all(map(is_alive, pids))
            await node.leaves()
            assert time.monotonic() - began <= 6.0
            exits = node.facts_of(RankExited)
            assert [exit_.ours for exit_ in exits] == [True, True]
            assert all(exit_.code in (-signal.SIGKILL, -signal.SIGTERM) for exit_ in exits)

    play(main())


def test_without_a_supervisor_it_leaves_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, leave_s=600.0) as node:
            await node.starts()
            await node.server.stop()
            await until(lambda: "no supervisor; the ranks go on" in node.log)
            node.seen = node.signal_step(signal.SIGTERM)
            await node.leaves()
            assert "no supervisor is there; leaving" in node.log

    play(main())


def test_what_was_staged_last_is_sent_in_the_time_that_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, leave_s=40.0, kill_grace_s=39.0) as node:
            before = set(node.descendants())
            pids = await node.starts(ranks=1, interval_steps=10)
            (uploader,) = before - {node.process.pid}
            os.kill(uploader, signal.SIGSTOP)
            await until(lambda: node.facts_of(Staged))
            node.seen = node.signal_step(signal.SIGTERM)
            await until(lambda: node.facts_of(RankExited))
            assert not any(map(is_alive, pids))
            sent = len(node.facts_of(ShardUploaded))
            newest = node.facts_of(Staged)[-1].shards
            os.kill(uploader, signal.SIGCONT)
            await until(lambda: len(node.facts_of(ShardUploaded)) > sent)
            await node.leaves()
            assert {shard.step for shard in newest} <= {
                shard.step for shard in node.facts_of(ShardUploaded)
            }

    play(main())


def test_a_rank_that_is_stuck_in_a_library_needs_no_grace(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_node(tmp_path, STUCK_IN_C) as node:
            await node.starts()
            await until(lambda: node.reports and len(node.reports[-1].ranks) == 2)
            assert (await node.orders("stop", STOP)).ok
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            assert all(exit_.ours for exit_ in node.facts_of(RankExited))

    play(main())


def test_a_handler_of_the_script_has_its_grace(tmp_path: Path) -> None:
    script = """
import signal, sys, time
from checkpointing import Checkpointer
ck = Checkpointer.from_env()
def leave(*_):
    time.sleep(0.3)
    sys.exit(9)
signal.signal(signal.SIGTERM, leave)
ck.restore({})
time.sleep(3600)
"""

    async def main() -> None:
        async with a_node(tmp_path, script) as node:
            await node.starts()
            await until(lambda: node.reports and len(node.reports[-1].ranks) == 2)
            await until(lambda: all(r.phase == "step" for r in node.reports[-1].ranks))
            assert (await node.orders("stop", STOP)).ok
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            assert [exit_.code for exit_ in node.facts_of(RankExited)] == [9, 9]

    play(main())


def test_a_shell_around_the_script_can_clear_up(tmp_path: Path) -> None:
    """The stuck process is not the one that the agent started: only itself is killed at once."""
    around = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUCK_IN_C!r}])
signal.signal(signal.SIGTERM, lambda *_: None)
child.wait()
print("clear", flush=True)
sys.exit(5)
"""

    async def main() -> None:
        async with a_node(tmp_path, around) as node:
            await node.starts()
            await until(lambda: node.reports and len(node.reports[-1].ranks) == 2)
            assert (await node.orders("stop", STOP)).ok
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            exits = node.facts_of(RankExited)
            assert [(exit_.code, exit_.last_line) for exit_ in exits] == [(5, "clear")] * 2

    play(main())


def test_a_script_without_checkpointer_dies_of_sigterm_and_the_warning_is_told_first(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with a_node(tmp_path, PLAIN, leave_s=600.0) as node:
            await node.starts()
            logs = node.run_dir / "logs" / "attempt-0001"
            await until(lambda: len([p for p in logs.glob("*") if p.stat().st_size]) == 2)
            node.signal_step(signal.SIGTERM)
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            ends = [(exit_.code, exit_.ours) for exit_ in node.facts_of(RankExited)]
            assert ends == [(-signal.SIGTERM, False)] * 2
            kinds = [type(fact.event) for fact in node.facts]
            assert kinds == [RanksStarted, AgentWarned, RankExited, RankExited]

    play(main())


@pytest.mark.parametrize(
    ("slurm", "signum"), [(False, signal.SIGTERM), (True, signal.SIGINT)], ids=["local", "ctrl-c"]
)
def test_outside_slurm_and_at_sigint_it_leaves_at_once(
    tmp_path: Path, slurm: bool, signum: int
) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, slurm=slurm, leave_s=600.0) as node:
            await node.starts()
            node.seen = node.descendants()
            if not slurm:
                node.process.send_signal(signal.SIGUSR2)
            node.process.send_signal(signum)
            await node.leaves()
            assert not node.facts_of(AgentWarned)

    play(main())


def test_the_last_facts_are_on_disk_before_it_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_node(tmp_path, SAVES, leave_s=3.0, kill_grace_s=2.0) as node:
            await node.starts()
            late: list[Callable[[], None]] = []
            ack = node.sessions.ack
            node.sessions.ack = lambda *of: late.append(lambda: ack(*of))  # type: ignore[method-assign]
            node.seen = node.signal_step(signal.SIGTERM)
            await until(lambda: len(node.facts_of(RankExited)) == 2)
            for say in late:
                say()
            node.sessions.ack = ack  # type: ignore[method-assign]
            await node.leaves()
            assert len({fact.n for fact in node.facts}) == len(node.facts)

    play(main())
