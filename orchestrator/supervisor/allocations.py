"""From what the launcher says of allocations to facts for the journal; pure."""

from collections.abc import Iterator

from orchestrator.config import RunConfig
from orchestrator.core.events import AgentLost, Ending, Event, JobObserved, NodeLeaving
from orchestrator.core.node import Allocation as Known
from orchestrator.core.state import State
from orchestrator.launch.launcher import Allocation, AllocationSpec


def changes(
    state: State, seen: Allocation, connected: frozenset[str], silent_s: dict[str, float]
) -> Iterator[Event]:
    """Compare what the launcher says of one allocation with what is known.

    Args:
        state: What is known.
        seen: What the launcher says.
        connected: Nodes whose agents are connected: those are not gone, whatever it says.
        silent_s: For how long each node has said nothing.
    """
    known = next((a for a in state.allocations if a.job == seen.job), None)
    if known is not None:
        yield from _job(known, seen)
    for name, why in seen.leaving.items():
        if name in state.nodes and state.nodes[name].leaving != why:
            yield NodeLeaving(node=name, why=why)
    for node in state.nodes.values():
        if node.leaving and node.job == seen.job and node.name not in seen.leaving:
            yield NodeLeaving(node=node.name, why="")
    for name, is_alive in seen.nodes.items():
        lost = state.nodes.get(name)
        if lost is None or not lost.alive or is_alive or name in connected:
            continue
        if lost.job and lost.job != seen.job:
            continue  # this allocation lost it, and another one has it
        yield AgentLost(
            node=name,
            incarnation=lost.incarnation,
            why="its agent's process is gone",
            silent_s=silent_s.get(name, 0.0),
        )


def needs_a_fresh_look(state: State, known: Known) -> bool:
    """Whether an answer from a moment ago will not do: who ends it decides what is done."""
    is_told = known.is_over and known.ending not in (None, Ending.UNKNOWN)
    return state.is_being_ended(known) and not is_told


def _job(known: Known, seen: Allocation) -> Iterator[JobObserved]:
    word = _word(seen)
    why = seen.why if word == "gone" else seen.queued
    ending = seen.ending if word == "gone" else None
    if (word, why, ending) == (known.phase.value, known.why, known.ending):
        return
    if known.is_over and ending in (None, Ending.UNKNOWN, known.ending):
        return  # it had been told apart before
    yield JobObserved(job=seen.job, state=word, why=why, ending=ending)


def _word(seen: Allocation) -> str:
    if not seen.running:
        return "gone"
    if seen.held:
        return "held"
    return "queued" if seen.queued else "running"


def spec_of(config: RunConfig) -> AllocationSpec:
    """What all allocations of a run have in common; key and nodes are those of a decision."""
    return AllocationSpec(
        key="",
        name=config.run.name,
        nodes=config.nodes.count + config.nodes.spares,
        gpus_per_node=config.nodes.gpus_per_node,
        run_dir=config.run_dir,
    )
