"""Whether the folders that a run file names can be what they are for."""

import os
import shutil
import tempfile
from pathlib import Path

from checkpointing.watched.places import conflict, folder_of
from orchestrator.config import RunConfig
from orchestrator.errors import PreconditionError

LEAST_FREE_BYTES = 64 * 1024 * 1024


def check_folders(config: RunConfig) -> None:
    """Check them; what other machines have of them is for their agents to find out.

    Raises:
        PreconditionError: One line that names the key and the fix.
    """
    memory, run_dir = config.nodes.memory_dir, config.run.dir
    if not memory.is_dir():
        raise PreconditionError(f"nodes.memory_dir: {memory} is no directory; create or correct it")
    root = config.memory_root
    if os.path.lexists(root) and (root.is_symlink() or root.stat().st_uid != os.getuid()):
        raise PreconditionError(
            f"nodes.memory_dir: {root} was put there by somebody else; choose another directory"
        )
    for key, folder in (("run.dir", run_dir), ("nodes.memory_dir", memory)):
        place = _writable(key, folder)
        free = shutil.disk_usage(place).free
        if free < LEAST_FREE_BYTES:
            raise PreconditionError(
                f"{key}: only {free >> 20} MiB free at {place}, "
                f"{LEAST_FREE_BYTES >> 20} needed; make room or choose another place"
            )
    is_here = config.nodes.launcher == "local"
    if config.checkpoint.disk_dir is not None and is_here:
        _writable("checkpoint.disk_dir", config.checkpoint.disk_dir)
    if config.checkpoint.watch is not None:
        _check_watched(config)
        if is_here:
            _writable("checkpoint.watch.dir", config.checkpoint.watch.dir)


def _check_watched(config: RunConfig) -> None:
    """Refuse to watch, and perhaps delete, what the run itself keeps."""
    checkpoint, watch = config.checkpoint, config.checkpoint.watch
    assert watch is not None
    others = {
        "checkpoint.store": folder_of(checkpoint.store or ""),
        "checkpoint.disk_dir": checkpoint.disk_dir,
        "the run's memory": config.memory_root,
        "the run's journal": config.run_dir / "journal.jsonl",
        "the run's nodes": config.run_dir / "nodes",
    }
    real = {name: path.resolve() for name, path in others.items() if path is not None}
    if why := conflict(watch.dir.resolve(), watch.pattern, real):
        raise PreconditionError(
            f"checkpoint.watch.dir: {why}; give the folder that only the trainer writes to"
        )


def _writable(key: str, folder: Path) -> Path:
    """Return the folder, or what is there of the path to it, in which a file could be made."""
    place = folder
    try:
        while not os.path.lexists(place):
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise PreconditionError(
            f"{key}: {place} is no writable directory: {error.strerror}; choose another"
        ) from error
