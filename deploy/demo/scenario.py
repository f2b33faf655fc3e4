"""What is broken, when, and what must come of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.demo.processes import is_alive
from deploy.demo.run import DemoError, Run
from orchestrator.core.state import State

Say = Callable[[str], None]

AWAY_S = 2.0
QUIET_STEPS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One thing that was done to the run, by the clock of the demo."""

    what: str
    at: float


def break_it(run: Run, say: Say) -> tuple[Blow, ...]:
    """Kill a rank, then a node, then the supervisor; return when each was done.

    Raises:
        DemoError: The run did not recover, or the supervisor's death touched a rank.
    """
    blows = []
    _quiet(run, 0)
    say("killing rank 1 with SIGKILL")
    blows.append(Blow(what="rank 1 got SIGKILL", at=time.time()))
    run.kill_rank(1)
    _recovered(run, 1)
    _quiet(run, run.state.best_step)
    assert run.state.attempt is not None
    node = run.state.attempt.nodes[1]
    say(f"{node} loses power: its agent, its ranks and its memory are gone")
    blows.append(Blow(what=f"{node} lost power", at=time.time()))
    run.kill_node(node)
    _recovered(run, 2)
    _quiet(run, run.state.best_step)
    say("killing the supervisor with SIGKILL")
    blows.append(Blow(what="supervisor got SIGKILL", at=time.time()))
    _replace_supervisor(run, say)
    return tuple(blows)


def _replace_supervisor(run: Run, say: Say) -> None:
    pids, epoch, step = run.rank_pids(), run.state.epoch, run.steps_done()
    run.kill_supervisor()
    time.sleep(AWAY_S)
    trained = run.steps_done() - step
    say(f"no supervisor for {AWAY_S:g} s; the ranks trained on for {trained} steps")
    if not all(is_alive(pid) for pid in pids.values()):
        raise DemoError("ranks died with the supervisor")
    run.start()
    run.wait("the new supervisor", lambda state: state.epoch > epoch and _progress(run, state))
    if run.rank_pids() != pids or not all(is_alive(pid) for pid in pids.values()):
        raise DemoError("the new supervisor did not leave the ranks alone")
    say(f"a new supervisor took over (epoch {run.state.epoch}); all ranks are the same processes")


def _progress(run: Run, state: State) -> bool:
    points = run.history.points.get(state.last_attempt, [])
    return bool(points) and bool(run.history.away) and points[-1].at > run.history.away[-1][1]


def _recovered(run: Run, incidents: int) -> None:
    def reached(state: State) -> bool:
        known = state.incidents
        return len(known) >= incidents and known[incidents - 1].first_step_at is not None

    run.wait(f"recovery number {incidents}", reached)


def _quiet(run: Run, since: int) -> None:
    """Wait for some training, and for a committed checkpoint that it can fall back to."""

    def reached(state: State) -> bool:
        newest = state.commits[0][0] if state.commits else 0
        return state.best_step >= since + QUIET_STEPS and newest > since

    run.wait("a checkpoint beyond the last incident", reached)
