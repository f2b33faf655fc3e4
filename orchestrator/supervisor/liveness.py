"""Which nodes are dead: silence makes one suspect, its machine's answer or none decides; pure.

A node that is late is asked at once, many times a second, whether its agent's port listens
(`probe`): a kernel answers that without the agent. What was seen then decides:

- it listens: the machine lives and is busy, so its agent may be silent up to `agent_lost_s`;
- it refuses: the agent's process is gone, at once;
- nothing, `PROBES` times in a row over at least `SPAN_S`, and a silence beyond what the node's own
  past makes plausible (`suspicion`): the machine is gone.

The chance to call a living machine dead: on a link that loses 30 % of the packets each way, a SYN
and its answer both get through with 0.7 x 0.7 = 0.49, so 20 probes go unanswered by chance with
0.51^20 = 1.4e-6 (14 would do for 1e-4; the kernel's own second SYN is not counted). Losses come in
bursts, therefore the span.

Silence is evidence against a node only while this supervisor can hear others. Time in which its own
loop stood still counts for nobody. Nodes whose silence one neighbour each cannot vouch for
(`VOUCHES_FOR`) are left to `agent_lost_s`: then the supervisor is more likely the one cut off. The
same goes for a port that never answered: a firewall looks like a dead machine.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.supervisor.ports import Ports
from orchestrator.supervisor.probe import ANSWER_S, Address, Answer, Answered, Probe
from orchestrator.supervisor.suspicion import Limits, Rhythm

LATE_BEATS = 1.5
PROBES = 20
SPAN_S = 1.0
SPAN_BEATS = 2.0
SPACING_S = 0.05
SLOW_SPACING_S = 0.25
REST_S = 1.0
REST_SHARE = 8.0
MOST_AT_ONCE = 32
VOUCHES_FOR = 4
OWN_DELAY_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node to be given up, and what was seen."""

    node: str
    why: str
    silent_s: float


@dataclass(slots=True)
class Round:
    """Probes of one late node in a row, none of them answered so far."""

    address: Address
    began: float
    due: float
    unanswered: int = 0
    last_unanswered: float = 0.0
    refused: bool = False


@dataclass(slots=True)
class Look:
    """What a look brought.

    Attributes:
        busy: Nodes whose machines answer while their agents are silent for too long to be normal;
            each is told once per silence.
        probes: To be sent now.
    """

    lost: list[Lost] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)


class Liveness:
    """Remembers who was heard when; every time is passed in.

    Args:
        limits: The run's numbers.
        now: When this supervisor began to listen.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._late_s = min(LATE_BEATS * limits.heartbeat_s, limits.agent_lost_s)
        self._span_s = max(SPAN_S, SPAN_BEATS * limits.heartbeat_s)
        self._began = now
        self._awake = now
        self._deaf_at = now
        self._rhythms: dict[str, Rhythm] = {}
        self._parted: dict[str, float] = {}
        self._rounds: dict[str, Round] = {}
        self._rests: dict[str, float] = {}
        self._told: set[str] = set()
        self._ports = Ports()

    def heard(self, node: str, now: float) -> None:
        """Note that a node's agent said anything."""
        self._wake(now)
        before = self._rhythms.get(node)
        self._rhythms[node] = before.heard(now, self._limits) if before else Rhythm.begun(now)
        self._be_at_ease(node)

    def joined(self, node: str, now: float) -> None:
        """Note that a node's agent connected."""
        self._parted.pop(node, None)
        self.heard(node, now)

    def parted(self, node: str, now: float) -> None:
        """Note that a connection ended: no sign of life, and reason enough to ask the machine."""
        self._wake(now)
        self._parted[node] = now

    def was_away(self, away_s: float, now: float) -> None:
        """Leave out a time in which this supervisor stood still and could hear nobody."""
        self._awake = self._deaf_at = now
        self._began = min(now, self._began + away_s)
        self._rhythms = {node: r.moved(away_s, now) for node, r in self._rhythms.items()}

    def silent_s(self, node: str, now: float) -> float:
        """Return for how long nothing was heard of a node."""
        rhythm = self._rhythms.get(node)
        return now - (rhythm.last if rhythm else self._began)

    def has_heard(self, node: str) -> bool:
        """Whether a node was heard since it was last lost, if it ever was."""
        return node in self._rhythms

    def gone_s(self, node: str, now: float) -> float:
        """Return for how long a node whose agent is gone has been without it, at most."""
        return min(self.silent_s(node, now), now - self._parted.get(node, -math.inf))

    def answered(self, done: Answered, now: float) -> None:
        """Take what came of a probe; one that was overtaken by events changes nothing."""
        self._wake(now)
        probe = done.probe
        if done.answer is Answer.CONNECTED:
            self._ports.reached(probe.address, done.here)
        asked = self._rounds.get(probe.node)
        if asked is None or asked.address != probe.address or probe.sent < asked.began:
            return
        match done.answer:
            case Answer.CONNECTED:
                del self._rounds[probe.node]
                rest_s = max(REST_S, self.silent_s(probe.node, now) / REST_SHARE)
                self._rests[probe.node] = now + rest_s
            case Answer.REFUSED:
                asked.refused = True
            case Answer.NOTHING:
                asked.unanswered += 1
                asked.last_unanswered = max(asked.last_unanswered, probe.sent)
            case Answer.UNKNOWN:
                self._rounds[probe.node] = Round(asked.address, began=now, due=now + SLOW_SPACING_S)

    def look(self, nodes: Mapping[str, Address | None], now: float) -> Look:
        """Judge the living nodes, given with their agents' ports; to be called many times a second.

        Returns: Each lost node once; it is forgotten, and new when it is heard again.
        """
        self._wake(now)
        late = {n: a for n, a in nodes.items() if self._is_late(n, now)}
        for node in self._rounds.keys() - late.keys():
            del self._rounds[node]
        if self._seems_cut_off(nodes, now):
            self._deaf_at = now
        found = Look()
        heard = [nodes[node] for node in self._rhythms if node in nodes] if late else []
        for node, address in late.items():
            lost = self._judge(node, now)
            if lost is not None:
                found.lost.append(lost)
                self._forget(node)
                continue
            is_known = node in self._rhythms
            if address is not None and self._ports.is_trusted(address, is_known, heard):
                found.probes += self._ask(node, address, now)
            if node in self._rests and self._is_odd(node, now) and node not in self._told:
                self._told.add(node)
                found.busy.append(node)
        punctual = ((node, its) for node, its in nodes.items() if its and node not in late)
        found.probes += self._ports.try_out(punctual, now)
        return found

    def _wake(self, now: float) -> None:
        """Notice that this process itself did not run for a while."""
        delay_s, self._awake = now - self._awake, now
        if delay_s > OWN_DELAY_S:
            self.was_away(delay_s, now)

    def _be_at_ease(self, node: str) -> None:
        self._rounds.pop(node, None)
        self._rests.pop(node, None)
        self._told.discard(node)

    def _forget(self, node: str) -> None:
        self._be_at_ease(node)
        self._rhythms.pop(node, None)
        self._parted.pop(node, None)

    def _is_late(self, node: str, now: float) -> bool:
        return node in self._parted or self.silent_s(node, now) > self._late_s

    def _is_odd(self, node: str, now: float) -> bool:
        """Whether a silence is longer than the node's own past makes plausible."""
        rhythm, silent_s = self._rhythms.get(node), self.silent_s(node, now)
        if silent_s <= self._limits.floor_s:
            return False
        return rhythm is None or silent_s > rhythm.patience_s(now, self._limits)

    def _judge(self, node: str, now: float) -> Lost | None:
        """Return why a late node is lost, None while it is not."""
        asked, silent_s = self._rounds.get(node), self.silent_s(node, now)
        if asked is not None and asked.refused:
            why = "its agent's process is gone: its machine refuses the connection"
            return Lost(node=node, why=why, silent_s=self.gone_s(node, now))
        text = f"silent for {silent_s:.1f} s"
        if asked is not None and self._is_odd(node, now) and self._is_conclusive(asked):
            text = f"{text}, and its machine does not answer ({asked.unanswered} probes)"
        elif silent_s <= self._limits.agent_lost_s:
            return None
        elif node in self._rests and (asked is None or not asked.unanswered):
            text = f"{text}, though its machine answers"
        return Lost(node=node, why=text, silent_s=silent_s)

    def _is_conclusive(self, asked: Round) -> bool:
        if asked.unanswered < PROBES or asked.last_unanswered - asked.began < self._span_s:
            return False
        return asked.began > self._deaf_at or self._ports.is_here(asked.address)

    def _seems_cut_off(self, nodes: Mapping[str, Address | None], now: float) -> bool:
        """Whether too few other machines are heard for the number of those that are not."""
        missing = sum(
            asked.unanswered > 0 and not self._ports.is_here(asked.address)
            for asked in self._rounds.values()
        )
        if not missing:
            return False
        vouching = sum(
            self._ports.is_elsewhere(address) and self._shows_life(node, now)
            for node, address in nodes.items()
        )
        return missing > VOUCHES_FOR * vouching

    def _shows_life(self, node: str, now: float) -> bool:
        if node in self._rests:
            return now < self._rests[node] + ANSWER_S
        return node not in self._parted and self.silent_s(node, now) <= self._late_s + ANSWER_S

    def _ask(self, node: str, address: Address, now: float) -> Iterator[Probe]:
        """Return the probe of a late node that is due now, if any."""
        if now < self._rests.get(node, 0.0):
            return
        asked = self._rounds.get(node)
        if asked is None or asked.address != address or self._is_stale(asked, now):
            if asked is None and len(self._rounds) >= MOST_AT_ONCE:
                return
            asked = self._rounds[node] = Round(address, began=now, due=now)
        if now >= asked.due:
            is_enough = asked.unanswered >= PROBES
            asked.due = now + (SLOW_SPACING_S if is_enough else SPACING_S)
            yield Probe(node=node, address=address, sent=now)

    def _is_stale(self, asked: Round, now: float) -> bool:
        """Whether a round is worth nothing, since the supervisor was deaf meanwhile."""
        return asked.began <= self._deaf_at < now and not self._ports.is_here(asked.address)
