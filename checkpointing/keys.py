"""Names of the objects of a run. Every attempt has its own, so nothing is ever overwritten."""

import re
from typing import Final

_COMMIT: Final = re.compile(r"/commits/step-(\d{12})\.json$")


def data_prefix(run: str, step: int, attempt: int) -> str:
    """Return what all objects of one attempt at one step begin with."""
    return f"{run}/data/step-{step:012d}/attempt-{attempt:04d}/"


def data_key(run: str, step: int, attempt: int, rank: int) -> str:
    """Return the key of a rank's extents."""
    return f"{data_prefix(run, step, attempt)}rank-{rank:05d}.bin"


def index_key(run: str, step: int, attempt: int, rank: int) -> str:
    """Return the key of a rank's index."""
    return f"{data_prefix(run, step, attempt)}rank-{rank:05d}.json"


def commits_prefix(run: str) -> str:
    """Return what all manifests of a run begin with."""
    return f"{run}/commits/"


def manifest_key(run: str, step: int) -> str:
    """Return the key of the manifest: one per step, whatever the attempt."""
    return f"{commits_prefix(run)}step-{step:012d}.json"


def step_of_manifest(key: str) -> int | None:
    """Return the step of a manifest's key, None for another key."""
    match = _COMMIT.search(key)
    return int(match.group(1)) if match else None
