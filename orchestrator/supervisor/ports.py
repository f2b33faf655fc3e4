"""Which agents' ports were ever reached: only such a port says something when silent; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.supervisor.probe import Address, Probe

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 300.0


@dataclass(slots=True)
class Trial:
    """When to try next to reach a port that has never answered, and how long to wait then."""

    due: float
    retry_s: float = FIRST_RETRY_S


class Ports:
    """Knows the ports that answered this supervisor; a firewall looks like a dead machine."""

    def __init__(self) -> None:
        self._reached: dict[Address, bool] = {}  # and whether it is on this machine
        self._trials: dict[Address, Trial] = {}

    def reached(self, address: Address, here: bool) -> None:
        """Note that a port answered."""
        self._reached[address] = here
        self._trials.pop(address, None)

    def is_here(self, address: Address) -> bool:
        """Whether it is on this machine: no network lies between."""
        return self._reached.get(address, False)

    def is_elsewhere(self, address: Address | None) -> bool:
        """Whether it was reached, and over the network."""
        return address is not None and self._reached.get(address) is False

    def is_trusted(self, address: Address, known: bool, heard: Sequence[Address | None]) -> bool:
        """Whether a port without an answer would say something.

        A new supervisor never reached the nodes that died before it came; those are taken to be
        like the others, when it reaches all whom it hears.

        Args:
            address: The port in question.
            known: This supervisor has heard its agent.
            heard: The ports of all agents that this supervisor has heard.
        """
        if address in self._reached:
            return True
        return not known and bool(heard) and all(its in self._reached for its in heard)

    def try_out(self, punctual: Iterable[tuple[str, Address]], now: float) -> Iterator[Probe]:
        """Return the probes to send to ports that were never reached, more and more rarely."""
        for node, address in punctual:
            if address in self._reached:
                continue
            trial = self._trials.setdefault(address, Trial(due=now))
            if now >= trial.due:
                trial.due = now + trial.retry_s
                trial.retry_s = min(2 * trial.retry_s, LAST_RETRY_S)
                yield Probe(node=node, address=address, sent=now)
