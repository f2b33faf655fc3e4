"""Keeps what a trainer wrote by itself: a checkpoint folder or file, byte by byte.

For trainers that have their own format and their own way to resume, such as those of Hugging Face
and Lightning. Every file is one tensor of bytes to the engine: stored with its CRC, committed as a
whole, and read back straight into new files.
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from checkpointing.dcp.location import Where
from checkpointing.dcp.reader import EverstepReader
from checkpointing.dcp.writer import EverstepWriter
from checkpointing.errors import RestoreFailed

_FILE: Final = "."
"""Name of what was kept as a single file."""


def keep(path: Path | str, url: Where, **options: Any) -> None:
    """Upload a folder or a file that is complete, and commit it.

    In a job of several ranks all call this, each with the folder that it sees; what several have
    is uploaded by one of them.

    Args:
        path: What was written.
        url: The checkpoint that it becomes.
        options: Of `EverstepWriter`.

    Raises:
        CheckpointException: From torch, naming what failed on which rank.
        FileNotFoundError: No rank has such a path.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if not alone:
        dist.barrier()  # every rank has written its part
    source = Path(path)
    files = {_FILE: source} if source.is_file() else dict(_files(source))
    if not files and (alone or dist.get_rank() == 0):
        raise FileNotFoundError(f"{source}: no file to keep")
    with _quiet():
        save(
            {name: _mapped(file) for name, file in files.items()},
            storage_writer=EverstepWriter(url, **options),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=alone,
        )


def fetch(url: Where, path: Path | str, **options: Any) -> Path:
    """Write what was kept to a new folder or file, which appears when all of it is there.

    Args:
        url: The checkpoint.
        path: Where to; must not exist.
        options: Of `EverstepReader`.

    Raises:
        CheckpointException: From torch, naming what failed.
        RestoreFailed: What is there was not kept by `keep`.
        FileExistsError: The path is taken.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: exists")
    reader = EverstepReader(url, **options)
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        state = {}
        for name, kind in reader.read_metadata().state_dict_metadata.items():
            is_bytes = isinstance(kind, TensorStorageMetadata) and len(kind.size) == 1
            if not is_bytes or not (name == _FILE or _is_safe(name)):
                raise RestoreFailed(f"{reader.checkpoint_id}: {name!r} is no file")
            state[name] = _created(place / name, cast(TensorStorageMetadata, kind).size.numel())
        with _quiet():
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load(state, storage_reader=reader, planner=planner, no_dist=True)
        del state
        place.rename(target)
    finally:
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
    return target


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base) / name
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _mapped(path: Path) -> torch.Tensor:
    """Return a file's bytes without reading them yet."""
    size = path.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _created(path: Path, size: int) -> torch.Tensor:
    """Return a new file as the memory that it shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let DCP not warn that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
