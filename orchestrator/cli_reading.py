"""What the commands read of a run: its directory, its journals, its losses, its supervisor."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import NotFound

if TYPE_CHECKING:
    from orchestrator.core.record import Record
    from orchestrator.core.state import State
    from orchestrator.views.history import History
    from orchestrator.views.report import Reference

PROBE_TIMEOUT_S = 1.0


def find(name: str) -> Path:
    """Return the directory of a run, from its name, its directory or its run.toml."""
    from orchestrator.app import find_run

    return find_run(name)


def load(run_dir: Path) -> "tuple[State, History, tuple[Record, ...]]":
    """Return where a run stands, its past, and its journal; NotFound when that is empty."""
    from orchestrator.supervisor.journal import read_records
    from orchestrator.views.history import History

    records = read_records(run_dir / "journal.jsonl")
    if not records:
        raise NotFound(f"{run_dir}: the journal is empty; nothing has happened yet")
    return *History.of(records), records


def earlier(run_dir: Path) -> list[dict[str, Any]]:
    """Tell what the journals cover that were put aside, oldest first."""
    from orchestrator.supervisor.journal import read_records
    from orchestrator.views.parts import part

    paths = sorted(run_dir.glob("journal-[0-9]*.jsonl"))
    return [part(path.name, read_records(path)) for path in paths]


def reference(name: str) -> "Reference":
    """Return the losses of another run, to compare with."""
    from orchestrator.views.losses import kept_curve, read_losses
    from orchestrator.views.report import Reference

    path = find(name) / "output" / "metrics.jsonl"
    curve = kept_curve(read_losses(path))
    if not curve:
        raise NotFound(f"--compare {name}: no losses in {path}")
    return Reference(name=path.parent.parent.name, curve=curve)


def supervisor(run_dir: Path) -> dict[str, Any]:
    """Find out where the supervisor is, and whether it answers."""
    import urllib.request

    try:
        where = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))
        url = str(where["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return {"url": None, "alive": False}
    found = {"url": url, "alive": False}
    if not url.startswith(("http://", "https://")):
        return found
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as `app.ask` does
    try:
        with direct.open(f"{url}/healthz", timeout=PROBE_TIMEOUT_S):
            found["alive"] = True
    except (OSError, ValueError):
        pass
    return found
