"""What is known of nodes beyond one run, as functions over the ledger's entries.

Entries come in the order in which they were written, and that order alone says what came before
what: the clocks of the machines that write may differ. Times only end exclusions and bound
windows, which last hours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from orchestrator.core.events import LedgerRead


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIncident:
    """A run blamed a node for an incident, and perhaps excluded it for all runs.

    Attributes:
        at: Unix time at which the run decided to write this, as its journal has it; trying again
            must give the same time. With run, incident and node it is this entry's identity: a
            run that starts afresh numbers its incidents from 1 again.
        incident: Its number in the run.
        excluded_s: For how long no run may use the node, 0 when it may.
    """

    at: float
    node: str
    run: str
    incident: int
    fault: str
    cause: str
    excluded_s: float = 0.0

    @property
    def until(self) -> float:
        """When the exclusion ends, as Unix time; in the past when there is none."""
        return self.at + self.excluded_s if self.excluded_s > 0 else -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExcluded:
    """A person took a node away from all runs until a Unix time; inf: until it is included."""

    at: float
    node: str
    by: str
    why: str
    until: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIncluded:
    """A person gave a node back to all runs."""

    at: float
    node: str
    by: str
    why: str = ""


Entry = NodeIncident | NodeExcluded | NodeIncluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Why no run may use a node now.

    Attributes:
        who: `run NAME`, or the person.
        until: Unix time, inf for "until a person includes it".
        evidence: The node's incidents since a person last included it, oldest first.
    """

    node: str
    why: str
    who: str
    until: float
    evidence: tuple[NodeIncident, ...]


def excluded(entries: Sequence[Entry], now: float) -> dict[str, Exclusion]:
    """Return the exclusions in force, by node in alphabetical order.

    What a person says holds over all that was said before it: an include ends it, an exclude
    replaces it, also by a shorter time. A run can only add: it never shortens what is in force.
    """
    said: dict[str, NodeExcluded | NodeIncident] = {}
    incidents: dict[str, list[NodeIncident]] = {}
    for entry in entries:
        match entry:
            case NodeIncluded():
                said.pop(entry.node, None)
                incidents.pop(entry.node, None)
            case NodeExcluded():
                said[entry.node] = entry
            case NodeIncident():
                incidents.setdefault(entry.node, []).append(entry)
                before = said.get(entry.node)
                if entry.excluded_s > 0 and (before is None or entry.until >= before.until):
                    said[entry.node] = entry
    return {
        node: _exclusion(entry, tuple(incidents.get(node, ())))
        for node, entry in sorted(said.items())
        if entry.until > now
    }


def _exclusion(entry: NodeExcluded | NodeIncident, evidence: tuple[NodeIncident, ...]) -> Exclusion:
    if isinstance(entry, NodeExcluded):
        who, why = entry.by, entry.why
    else:
        who, why = f"run {entry.run}", f"{entry.fault}, incident {entry.incident}: {entry.cause}"
    return Exclusion(node=entry.node, why=why, who=who, until=entry.until, evidence=evidence)


def history(entries: Sequence[Entry], node: str) -> tuple[Entry, ...]:
    """Return all that was written about a node, oldest first."""
    return tuple(entry for entry in entries if entry.node == node)


def nodes(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the nodes that something is known of, in alphabetical order."""
    return tuple(sorted({entry.node for entry in entries}))


def excluded_by_runs(
    entries: Sequence[Entry], now: float, window_s: float
) -> dict[str, NodeIncident]:
    """Return the nodes that runs excluded by themselves inside the window, with the last reason.

    A node counts until the window has passed over it, even when its exclusion ended earlier, and
    no longer once a person has spoken about it: including it, or excluding it as well.
    """
    found: dict[str, NodeIncident] = {}
    for entry in entries:
        if not isinstance(entry, NodeIncident):
            found.pop(entry.node, None)
        elif entry.excluded_s > 0 and entry.at > now - window_s:
            found[entry.node] = entry
    return dict(sorted(found.items()))


def is_breaker_open(entries: Sequence[Entry], now: float, window_s: float, limit: int) -> bool:
    """Whether runs have excluded so many nodes that a person must look before they do it again."""
    return len(excluded_by_runs(entries, now, window_s)) >= limit


def as_event(entries: Sequence[Entry], now: float, window_s: float) -> LedgerRead:
    """Return what a run needs to know, equal as long as nothing changes or expires."""
    return LedgerRead(
        excluded={n: f"{x.who}: {x.why}" for n, x in excluded(entries, now).items()},
        excluded_lately=len(excluded_by_runs(entries, now, window_s)),
    )
