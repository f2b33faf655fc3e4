"""What people and Prometheus are told of watched folders."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from orchestrator.core.folders import Folders
from orchestrator.views.families import counter, gauge
from orchestrator.views.units import seconds, size


def folders_json(folders: Folders, now: float) -> dict[str, Any]:
    """Return which watched folder was committed last, its age, and the last failure."""
    at = folders.committed_at
    return {
        "last": folders.entry or None,
        "version": folders.version or None,
        "nbytes": folders.nbytes if folders.entry else None,
        "age_s": None if at is None else max(0.0, now - at),
        "failure": folders.failure or None,
        "failed": folders.failed_entry or None,
        "failed_age_s": max(0.0, now - folders.failed_at) if folders.failure else None,
        "failures": folders.failures,
        "removed": folders.removed,
    }


def last_words(body: dict[str, Any]) -> str:
    """Say which folder was committed last."""
    if body["last"] is None:
        return "none committed yet"
    age = f", {seconds(body['age_s'])} ago" if body["age_s"] is not None else ""
    return f"{body['last']}{age} ({size(body['nbytes'])})"


def failure_words(body: dict[str, Any]) -> str:
    """Say what failed last, "" for nothing."""
    if body["failure"] is None:
        return ""
    name = f"{body['failed']}: " if body["failed"] else ""
    return f"{seconds(body['failed_age_s'])} ago: {name}{body['failure']}"


def families(folders: Folders, run: str, over: bool, now: float) -> Iterator[Metric]:
    """Yield the families `everstep_folder_*`."""
    if folders.committed_at is not None:
        doc = "When a watched folder was committed last"
        at = folders.committed_at
        yield from gauge("folder_last_success_timestamp_seconds", doc, run, at)
        if not over:
            doc = "Time since a watched folder was committed last"
            yield from gauge("folder_age_seconds", doc, run, max(0.0, now - at))
    if folders.entry:
        doc = "Size of the watched folder that was committed last"
        yield from gauge("folder_bytes", doc, run, folders.nbytes)
    doc = "Times that a watched folder could not be kept; it is tried again"
    yield from counter("folder_failures", doc, run, folders.failures)
    if folders.failure:
        doc = "When a watched folder could not be kept last"
        yield from gauge("folder_last_failure_timestamp_seconds", doc, run, folders.failed_at)
    doc = "Watched folders deleted from disks once they were committed"
    yield from counter("folder_removals", doc, run, folders.removed)
