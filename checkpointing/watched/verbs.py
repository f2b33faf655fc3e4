"""What people and job scripts ask of what is kept: a list, and one of it back."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from checkpointing.errors import (
    CheckpointingError,
    ManifestInvalid,
    NothingUsable,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    RestoreFailed,
    StoreUnavailable,
)
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.commits import Committed, all_newest
from checkpointing.watched.fetching import PARTIAL, fetch

_LOCK: Final = ".everstep-restore.lock"
_POLL_S: Final = 0.1
_SPOILT: Final = (ManifestInvalid, ObjectConflict, ObjectCorrupt, ObjectMissing, RestoreFailed)
_log = logging.getLogger(__name__)


def rows(store: ObjectStore, prefix: str) -> list[dict[str, Any]]:
    """Return what is kept under a prefix as plain values, newest first."""
    return [
        {
            "entry": one.commit.entry,
            "version": one.version,
            "attempt": one.commit.attempt,
            "nbytes": one.commit.nbytes,
            "nodes": [ref.node for ref in one.commit.parts],
            "committed_at": one.at,
        }
        for one in reversed(all_newest(store, prefix))
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return those rows for a person."""
    lines = [f"{'entry':32} {'version':>7} {'nodes':>5} {'bytes':>15}  committed"]
    for row in found:
        at = row["committed_at"]
        when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at else "-"
        entry = row["entry"].encode("ascii", "backslashreplace").decode()
        lines.append(
            f"{entry:32} {row['version']:7} {len(row['nodes']):5} {row['nbytes']:15}  {when}"
        )
    return "\n".join(lines)


def restore(
    store: ObjectStore,
    prefix: str,
    directory: Path,
    *,
    entry: str | None = None,
    node: str = "",
    wait_s: float = 3600.0,
) -> Path | None:
    """Bring back one entry, or the newest that is sound; one that is on the disk is left alone.

    Several processes of a node, or of all nodes of a shared directory, may do this at once.

    Args:
        store: Where it is.
        prefix: What it is kept under.
        directory: Where to.
        entry: Which; None for the newest.
        node: Whose part, where each node has its own.
        wait_s: How long to wait for another process that is doing it.

    Returns:
        Where it is, None when nothing was ever kept.

    Raises:
        CheckpointingError: It cannot be had, or the other process takes too long; that is never
            "nothing was kept".
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory, wait_s) as is_alone:
        if is_alone:
            _remove_left_over(directory)
        found = [c for c in all_newest(store, prefix) if entry in (None, c.commit.entry)]
        if not found:
            if entry is not None:
                raise ObjectMissing(f"{entry}: not kept under {prefix!r}")
            if store.list(names.commits_prefix(prefix)):
                raise NothingUsable(f"{prefix!r}: there are commits, and all are spoilt")
            return None
        return _newest_sound(store, prefix, directory, found, node)


def _newest_sound(
    store: ObjectStore, prefix: str, directory: Path, found: list[Committed], node: str
) -> Path:
    error: CheckpointingError | None = None
    for committed in reversed(found):
        target = directory / committed.commit.entry
        if os.path.lexists(target):
            return target
        try:
            return fetch(store, prefix, committed, directory, node)
        except _SPOILT as spoilt:
            if len(found) == 1:
                raise
            _log.warning("%s is not used: %s", committed.commit.entry, spoilt)
            error = spoilt
    raise NothingUsable(f"{prefix!r}: none of {len(found)} can be used, the oldest: {error}")


def _remove_left_over(directory: Path) -> None:
    """Free what restores wrote that were killed: one after the other they would fill the disk."""
    for path in directory.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _alone(directory: Path, wait_s: float) -> Iterator[bool]:
    """Wait until no other process restores; False where nobody can tell."""
    is_alone = False
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreUnavailable(
                        f"{directory}: another process restores for {wait_s:g} s"
                    ) from None
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks: the rename lets one win
        yield is_alone
    finally:
        os.close(descriptor)
