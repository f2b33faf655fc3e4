"""What `everstep nodes` says as JSON: the nodes of the ledger, and the history of one."""

import re
from collections.abc import Sequence
from typing import Any

from orchestrator.core import ledger
from orchestrator.core.ledger import Entry, Exclusion, NodeExcluded, NodeIncident
from orchestrator.core.policy import Policy
from orchestrator.views.units import plain

RECENT_S = 30 * 86_400.0


def overview(entries: Sequence[Entry], now: float, policy: Policy) -> dict[str, Any]:
    """Return every node that something is known of, excluded ones first, and the breaker."""
    excluded = ledger.excluded(entries, now)
    by_node: dict[str, list[Entry]] = {}
    for entry in entries:
        by_node.setdefault(entry.node, []).append(entry)
    names = sorted(by_node, key=lambda name: (name not in excluded, natural(name)))
    return {
        "at": now,
        "nodes": [_node(name, by_node[name], excluded.get(name), now) for name in names],
        "breaker": breaker(entries, now, policy),
    }


def _node(
    name: str, entries: Sequence[Entry], exclusion: Exclusion | None, now: float
) -> dict[str, Any]:
    incidents = [entry for entry in entries if isinstance(entry, NodeIncident)]
    last = incidents[-1] if incidents else None
    return {
        "name": name,
        **state(exclusion),
        "incidents_30d": sum(incident.at > now - RECENT_S for incident in incidents),
        "last_fault": last.fault if last else None,
        "last_at": last.at if last else None,
    }


def state(exclusion: Exclusion | None) -> dict[str, Any]:
    """Return whether runs may use a node; `until` is None for "until it is included"."""
    if exclusion is None:
        return {"state": "ok", "until": None, "who": "", "why": ""}
    until = plain(exclusion.until)
    return {"state": "excluded", "until": until, "who": exclusion.who, "why": exclusion.why}


def breaker(entries: Sequence[Entry], now: float, policy: Policy) -> dict[str, Any]:
    """Return how near runs are to the limit beyond which they exclude no node by themselves."""
    limit, window_s = policy.exclusion_limit, policy.budget_window_s
    found = ledger.excluded_by_runs(entries, now, window_s)
    is_open = ledger.is_breaker_open(entries, now, window_s, limit)
    return {"open": is_open, "nodes": list(found), "limit": limit, "window_s": window_s}


def told(entries: Sequence[Entry], node: str, now: float) -> dict[str, Any]:
    """Return what is known of one node, oldest first."""
    return {
        "at": now,
        "node": node,
        **state(ledger.excluded(entries, now).get(node)),
        "history": [_line(entry) for entry in ledger.history(entries, node)],
    }


def _line(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, NodeIncident):
        return {
            "at": entry.at,
            "what": "incident",
            "run": entry.run,
            "incident": entry.incident,
            "fault": entry.fault,
            "cause": entry.cause,
            "excluded_s": plain(entry.excluded_s),
        }
    said = {"at": entry.at, "by": entry.by, "why": entry.why}
    if isinstance(entry, NodeExcluded):
        return {**said, "what": "excluded", "until": plain(entry.until)}
    return {**said, "what": "included"}


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key that sorts node2 before node10."""
    return tuple((word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name))
