"""Each node of an attempt is told where its buddy takes copies of its snapshots."""

from orchestrator.core.actions import Decision, Pair
from orchestrator.core.buddies import addresses
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import is_pending, make
from orchestrator.core.state import AttemptPhase, State

RETRY_S = 30.0


def pair(state: State, now: float, policy: Policy) -> Decision | None:
    """Tell the nodes that do not know it, or know an address that is no longer the buddy's.

    A buddy that has not said where it takes copies, or does not any more, is told of once it has.
    """
    attempt = state.attempt
    if not policy.peers or attempt is None or attempt.phase is not AttemptPhase.RUNNING:
        return None
    if attempt.first_trouble is not None or is_pending(state, Pair):
        return None
    if attempt.unpaired_at and 0 <= now - attempt.unpaired_at < RETRY_S:
        return None
    wanted = addresses(state, attempt.nodes)
    news = {node: at for node, at in wanted.items() if at and attempt.buddies.get(node) != at}
    if not news:
        return None
    action = Pair(attempt=attempt.number, buddies=news)
    reason = f"{len(news)} of {len(wanted)} nodes do not know yet who keeps copies of their memory"
    return make(state, "pair", action, reason, (attempt.ordered_seq,), state.seq)
