"""Events on their way to the journal, and which agents' words count."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.core import events as ev
from orchestrator.core.events import Event, Origin
from orchestrator.core.state import State
from orchestrator.supervisor.sessions import Session

STRANGER_S = 5.0


@dataclass(frozen=True, slots=True)
class Inbound:
    """An event on its way to the journal."""

    event: Event
    origin: Origin | None = None


def is_repeated(state: State, origin: Origin | None) -> bool:
    """Whether an agent's fact is in the journal already."""
    if origin is None:
        return False
    incarnation, n = state.seen.get(origin.node, ("", 0))
    return incarnation == origin.incarnation and origin.n <= n


def live_attempt_of(state: State, node: str) -> int:
    """Return the live attempt that a node has ranks of, 0 for none."""
    attempt = state.attempt
    if attempt is None or not attempt.is_live:
        return 0
    return attempt.number if node in attempt.nodes and node not in attempt.lost else 0


def strangers(
    state: State, sessions: Iterable[Session], batch: Sequence[Inbound], now: float
) -> Iterator[Session]:
    """Yield the sessions of agents that do not count, so that they introduce themselves again.

    Such an agent was given up while its hello waited to be counted, or is connected all the same:
    it was welcomed to an attempt that goes on without it. One that was welcomed to none ends its
    ranks and comes again by itself; it is helped on after a while.
    """
    events = [inbound.event for inbound in batch]
    joined = {event.node for event in events if isinstance(event, ev.AgentJoined)}
    lost = {event.node for event in events if isinstance(event, ev.AgentLost)}
    for session in sessions:
        node = session.hello.node
        if state.is_current(node, session.hello.incarnation):
            continue
        is_misled = node in joined and session.welcome.attempt != live_attempt_of(state, node)
        if is_misled or node in lost or now - session.since > STRANGER_S:
            yield session
