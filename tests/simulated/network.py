"""Heartbeats and probes over a network made of numbers, judged by the real `Liveness`."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.supervisor.liveness import Liveness, Lost
from orchestrator.supervisor.probe import ANSWER_S, Address, Answer, Answered, Probe
from orchestrator.supervisor.suspicion import Limits

TICK_S = 0.05
TRIP_S = 0.001


@dataclass(slots=True)
class Machine:
    """A node: what is wrong with it, and since when.

    Attributes:
        agent: The agent's process runs and is given time; a stopped one neither beats nor is gone.
        port: What the kernel says to a SYN that arrives; None is nothing.
        loss: Chance of each packet to be lost, each way.
        filtered: A firewall drops what comes to its port.
        late_s: Added to the time of each heartbeat, anew for each.
    """

    address: Address
    here: bool = False
    agent: bool = True
    port: Answer | None = Answer.CONNECTED
    loss: float = 0.0
    filtered: bool = False
    late_s: Callable[[], float] = lambda: 0.0


@dataclass
class Network:
    """A supervisor and its nodes; time passes by `run`.

    Attributes:
        is_up: The supervisor's own cable is in.
        frozen_until: The supervisor's process does not run before that.
    """

    limits: Limits
    machines: dict[str, Machine]
    seed: int = 0
    now: float = 1000.0
    is_up: bool = True
    frozen_until: float = 0.0
    lost: dict[str, tuple[float, Lost]] = field(default_factory=dict)
    busy: list[str] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.liveness = Liveness(self.limits, self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for node in self.machines:
            self.liveness.joined(node, self.now)
            self._at(self.now + self._random.random() * self.limits.heartbeat_s, self._beat(node))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            while self._events and self._events[0][0] <= self.now:
                _, _, event = heapq.heappop(self._events)
                event()
            if self.now >= self.frozen_until:
                self._look()

    def seconds_to_lose(self, node: str, at_most: float) -> float | None:
        """Let time pass until the node is lost; return how long that took."""
        began = self.now
        while node not in self.lost and self.now < began + at_most:
            self.run(TICK_S)
        return self.lost[node][0] - began if node in self.lost else None

    def _look(self) -> None:
        alive = {n: m.address for n, m in self.machines.items() if n not in self.lost}
        look = self.liveness.look(alive, self.now)
        self.busy += look.busy
        for lost in look.lost:
            self.lost[lost.node] = (self.now, lost)
        for probe in look.probes:
            self.sent += 1
            self._send(probe)

    def _send(self, probe: Probe) -> None:
        machine = self.machines[probe.node]
        is_lost = self._drops(machine) or self._drops(machine) or machine.filtered
        is_lost = is_lost or machine.port is None
        answer = Answer.NOTHING if is_lost or machine.port is None else machine.port
        after_s = ANSWER_S if is_lost else TRIP_S
        done = Answered(probe=probe, answer=answer, here=machine.here)
        self._at(self.now + after_s, lambda: self._hear(lambda: self._answered(done)))

    def _answered(self, done: Answered) -> None:
        self.liveness.answered(done, self.now)

    def _drops(self, machine: Machine) -> bool:
        if not machine.here and not self.is_up:
            return True
        return self._random.random() < machine.loss

    def _beat(self, node: str) -> Callable[[], None]:
        def beat() -> None:
            machine = self.machines[node]
            self._at(self.now + self.limits.heartbeat_s + machine.late_s(), beat)
            if machine.agent and machine.port is Answer.CONNECTED:
                self._transmit(node, wait_s=0.2)

        return beat

    def _transmit(self, node: str, wait_s: float) -> None:
        """Send as TCP does: what is lost comes again, later and later; order is left aside."""
        machine = self.machines[node]
        if machine.port is not Answer.CONNECTED:
            return
        if self._drops(machine):
            self._at(self.now + wait_s, lambda: self._transmit(node, min(2 * wait_s, 60.0)))
        else:
            self._hear(lambda: self.liveness.heard(node, self.now))

    def _hear(self, what: Callable[[], None]) -> None:
        """Let the supervisor take it, once it runs."""
        if self.now >= self.frozen_until:
            what()
        else:
            self._at(self.frozen_until, what)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))


def network(
    nodes: int = 4,
    *,
    here: bool = False,
    seed: int = 0,
    filtered: tuple[str, ...] = (),
    **limits: float,
) -> Network:
    """Make a network of punctual nodes that have been heard for a while."""
    given = Limits(**{"heartbeat_s": 0.5, "agent_lost_s": 15.0, **limits})
    machines = {
        f"n{n}": Machine(address=("127.0.0.1" if here else f"10.0.0.{n + 1}", 9000 + n), here=here)
        for n in range(nodes)
    }
    for node in filtered:
        machines[node].filtered = True
    made = Network(limits=given, machines=machines, seed=seed)
    made.run(5 * given.heartbeat_s + 5)
    return made
