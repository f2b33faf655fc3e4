"""Names of the objects of a run. Every attempt has its own, so nothing is ever overwritten."""

import re
from typing import Final

_PLACE: Final = r"step-(\d{12,18})-attempt-(\d{4,9})"
_COMMIT: Final = re.compile(rf"/commits/{_PLACE}\.json$")
_OLD_COMMIT: Final = re.compile(r"/commits/step-(\d{12})\.json$")
_QUARANTINE: Final = re.compile(rf"/quarantine/{_PLACE}\.json$")
_DELETING: Final = re.compile(rf"/deleting/{_PLACE}\.json$")
_DATA: Final = re.compile(r"/data/step-(\d{12,18})/attempt-(\d{4,9})/")


def data_root(run: str) -> str:
    """Return what the data of all attempts of a run begins with."""
    return f"{run}/data/"


def data_prefix(run: str, step: int, attempt: int) -> str:
    """Return what all objects of one attempt at one step begin with."""
    return f"{data_root(run)}step-{step:012d}/attempt-{attempt:04d}/"


def data_key(run: str, step: int, attempt: int, rank: int) -> str:
    """Return the key of a rank's extents."""
    return f"{data_prefix(run, step, attempt)}rank-{rank:05d}.bin"


def index_key(run: str, step: int, attempt: int, rank: int) -> str:
    """Return the key of a rank's index."""
    return f"{data_prefix(run, step, attempt)}rank-{rank:05d}.json"


def commits_prefix(run: str) -> str:
    """Return what all manifests of a run begin with."""
    return f"{run}/commits/"


def manifest_key(run: str, step: int, attempt: int) -> str:
    """Return the key of a manifest: one per step and attempt.

    A step whose checkpoint is quarantined can so be committed again by a later attempt.
    """
    return f"{commits_prefix(run)}{_place(step, attempt)}.json"


def old_manifest_key(run: str, step: int) -> str:
    """Return the key that a manifest had when it was one per step, whatever the attempt."""
    return f"{commits_prefix(run)}step-{step:012d}.json"


def quarantine_prefix(run: str) -> str:
    """Return what all quarantine records of a run begin with."""
    return f"{run}/quarantine/"


def quarantine_key(run: str, step: int, attempt: int) -> str:
    """Return the key whose presence keeps a checkpoint from ever being chosen."""
    return f"{quarantine_prefix(run)}{_place(step, attempt)}.json"


def deleting_prefix(run: str) -> str:
    """Return what all records of unfinished deletions begin with."""
    return f"{run}/deleting/"


def deleting_key(run: str, step: int, attempt: int) -> str:
    """Return the key that tells what a deletion has still to remove, should it be interrupted."""
    return f"{deleting_prefix(run)}{_place(step, attempt)}.json"


def averages_prefix(run: str) -> str:
    """Return what everything about averages begins with: out of the sight of who resumes."""
    return f"{run}/averages/"


def average_run(run: str, label: str) -> str:
    """Return the name under which averages with a label are kept, as if they were a run's."""
    return f"{averages_prefix(run)}{label}"


def is_average(run: str) -> bool:
    """Tell a name that `average_run` made from that of a run."""
    return "/averages/" in run


def place_of_manifest(key: str) -> tuple[int, int | None] | None:
    """Return (step, attempt) of a manifest's key, attempt None for an old one; None for others."""
    if place := _match(_COMMIT, key):
        return place
    old = _OLD_COMMIT.search(key)
    return (int(old.group(1)), None) if old else None


def place_of_quarantine(key: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a quarantine record's key, None for another key."""
    return _match(_QUARANTINE, key)


def place_of_deletion(key: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a deletion record's key, None for another key."""
    return _match(_DELETING, key)


def place_of_data(key: str) -> tuple[int, int] | None:
    """Return (step, attempt) of an object of data, None for another key."""
    return _match(_DATA, key)


def _place(step: int, attempt: int) -> str:
    return f"step-{step:012d}-attempt-{attempt:04d}"


def _match(pattern: re.Pattern[str], key: str) -> tuple[int, int] | None:
    match = pattern.search(key)
    return (int(match.group(1)), int(match.group(2))) if match else None
