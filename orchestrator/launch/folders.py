"""Where the files of each allocation of a run lie: one folder per key below `run_dir/submitit`."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from orchestrator.durable import write_json
from orchestrator.launch.launcher import AllocationSpec

NOTE = "job.json"


def home(run_dir: Path) -> Path:
    """Return the folder above those of all allocations of a run."""
    return run_dir / "submitit"


def slug(key: str) -> str:
    """Return a key as one part of a path, without what paths, shells and sbatch treat specially.

    Keys of one run (`run/attempt/launch/n`) differ in numbers only, so that none is mixed up.
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", key)


def folder_of(spec: AllocationSpec) -> Path:
    """Return the folder of an allocation, perhaps not there yet."""
    return home(spec.run_dir.absolute()) / slug(spec.key)


def note_of(folder: Path) -> dict[str, Any]:
    """Read how the allocation in a folder is found again, {} when that is not noted.

    Raises:
        ValueError: What is noted is no JSON object.
    """
    path = folder / NOTE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value


def write_note(folder: Path, note: dict[str, Any]) -> None:
    """Note how the allocation in a folder is found again; a reader sees all of it or nothing."""
    write_json(folder / NOTE, note)


def folders_in(run_dir: Path) -> tuple[Path, ...]:
    """Return the folders of all allocations of a run, those without a note included."""
    with contextlib.suppress(FileNotFoundError):
        return tuple(sorted(path for path in home(run_dir).iterdir() if path.is_dir()))
    return ()
