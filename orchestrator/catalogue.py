"""The checkpoints of a run in its store: which there are, and what can be done with them.

Every function returns the JSON object that `everstep checkpoints` prints. What a store or a
checkpoint says wrong comes out as one of the errors of `orchestrator.errors`.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkpointing import keys
from checkpointing.errors import (
    CheckpointingError,
    ManifestInvalid,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    RestoreFailed,
    StoreError,
)
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.quarantine import list_quarantined
from checkpointing.resolver import CommitInfo, find_commit, read_catalogue, usable
from checkpointing.retention import RetentionPolicy
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from orchestrator.app import configuration, find_run, read, state_in
from orchestrator.config import RunConfig
from orchestrator.errors import (
    CheckpointDamaged,
    ConfigError,
    EverstepError,
    NotFound,
    PreconditionError,
)

_THREADS: Final = 8
_STEP: Final = re.compile(r"(\d{1,18})(?:/(\d{1,9}))?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the checkpoints are.

    Attributes:
        store: The store.
        url: Its address.
        run: Name of the run, or what an average is kept under.
        directory: The run's directory, None when only its store is known.
        kept: What the run's file says of what stays; None when it does not.
    """

    store: ObjectStore
    url: str
    run: str
    directory: Path | None
    kept: RetentionPolicy | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What every answer begins with."""
        return {"run": self.run, "store": self.url}


@contextmanager
def told() -> Iterator[None]:
    """Raise what checkpointing raises as what the command line documents."""
    try:
        yield
    except EverstepError:
        raise
    except ObjectMissing as error:
        raise NotFound(str(error)) from error
    except ObjectConflict as error:
        raise ConfigError(str(error)) from error
    except (ManifestInvalid, RestoreFailed, ObjectCorrupt) as error:
        raise CheckpointDamaged(str(error)) from error
    except StoreError as error:
        raise PreconditionError(f"checkpoint.store: {error}") from error
    except CheckpointingError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise PreconditionError(f"{place}{error.strerror or error}") from error


def open_target(
    run: str | None, url: str | None, name: str | None, endpoint: str | None, region: str | None
) -> Target:
    """Find the store and the name of a run.

    Raises:
        ConfigError: Neither a run nor a store with a name, or both.
        NotFound: No such run.
        PreconditionError: The run has no store, or it cannot be opened.
    """
    if run is not None and (url is not None or name is not None):
        raise ConfigError("RUN: give either RUN, or --store URL with --run NAME")
    directory = kept = None
    if run is None:
        if url is None or name is None:
            raise ConfigError("RUN: missing; or give --store URL with --run NAME")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--run: {name!r} is no name of a run")
        where = StoreConfig(url=url, endpoint_url=endpoint, region=region)
    else:
        config, directory = _configured(run)
        if config.checkpoint.store is None:
            raise PreconditionError(f"checkpoint.store: {config.run.name} has no store")
        name, keep = config.run.name, config.checkpoint.keep
        kept = keep.policy() if keep else None
        where = StoreConfig(
            url=config.checkpoint.store,
            endpoint_url=endpoint or config.checkpoint.endpoint_url,
            region=region or config.checkpoint.region,
        )
    try:
        store = open_store(where)
    except StoreError as error:
        key = "--store" if directory is None and run is None else "checkpoint.store"
        raise (ConfigError if run is None else PreconditionError)(f"{key}: {error}") from error
    return Target(store=store, url=where.url, run=name, directory=directory, kept=kept)


def _configured(run: str) -> tuple[RunConfig, Path | None]:
    path = Path(run)
    if path.suffix == ".toml" and path.is_file():  # also one that was never started
        written = read(path)
        return written, written.run_dir if written.run_dir.is_dir() else None
    directory = find_run(run)
    config = configuration(directory)
    if config is None:
        raise NotFound(f"{directory}: its run.json cannot be read; give --store URL --run NAME")
    return config, directory


def of_average(target: Target, label: str) -> Target:
    """Return where the averages with a label are.

    Raises:
        ConfigError: No label.
    """
    if not _NAME.fullmatch(label):
        raise ConfigError(f"--average: {label!r} is no label of an average")
    return Target(
        store=target.store,
        url=target.url,
        run=keys.average_run(target.run, label),
        directory=target.directory,
    )


def parse_step(text: str, option: str = "--step") -> tuple[int, int | None]:
    """Read `STEP` or `STEP/ATTEMPT`.

    Raises:
        ConfigError: Neither.
    """
    match = _STEP.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r}: write STEP or STEP/ATTEMPT, such as 500 or 500/2")
    return int(match.group(1)), int(match.group(2)) if match.group(2) else None


def pick(target: Target, step: str | None, option: str = "--step") -> CommitInfo:
    """Return the commit that is asked for, else the newest usable one.

    Raises:
        NotFound: There is none.
    """
    with told():
        if step is not None:
            return find_commit(target.store, target.run, *parse_step(step, option))
        for commit, _ in usable(target.store, read_catalogue(target.store, target.run)):
            return commit
    raise NotFound(f"{target.run}: no usable checkpoint in {target.url}")


def manifest_of(target: Target, commit: CommitInfo) -> Manifest:
    """Read a commit's manifest."""
    with told():
        return read_manifest(target.store, commit.key)


def newest(target: Target, count: int) -> list[Manifest]:
    """Return the manifests of the newest usable steps, of each the newest attempt.

    Raises:
        NotFound: There are not so many.
    """
    found: list[Manifest] = []
    with told():
        for _, manifest in usable(target.store, read_catalogue(target.store, target.run)):
            if not found or found[-1].step != manifest.step:
                found.append(manifest)
            if len(found) == count:
                return found
    has = f"{len(found)} usable step{'' if len(found) == 1 else 's'}"
    raise NotFound(f"{target.run}: {has} in {target.url}, {count} asked for")


def listing(target: Target, last: int) -> dict[str, Any]:
    """Tell of the newest checkpoints, of what is in quarantine, and of averages."""
    with told():
        catalogue = read_catalogue(target.store, target.run)
        reasons = {r.place: r for r in list_quarantined(target.store, target.run)}
        every = sorted(
            (*catalogue.commits, *catalogue.quarantined), key=lambda c: c.place, reverse=True
        )
        with ThreadPoolExecutor(_THREADS) as pool:
            rows = list(pool.map(lambda c: _row(target.store, c), every[:last]))
        averages = _averages(target)
    for row in rows:
        if record := reasons.get((row["step"], row["attempt"])):
            row |= {"state": "quarantined", "why": record.why, "who": record.who}
    return {
        **target.about,
        "checkpoints": rows,
        "older": max(len(every) - last, 0),
        "unreadable": list(catalogue.unreadable),
        "averages": averages,
    }


def _row(store: ObjectStore, commit: CommitInfo) -> dict[str, Any]:
    row = {
        "step": commit.step,
        "attempt": commit.attempt,
        "committed_at": commit.committed_at,
        "state": "committed",
        "why": "",
        "nbytes": None,
        "ranks": None,
        "tensors": None,
    }
    try:
        manifest = read_manifest(store, commit.key)
    except (ManifestInvalid, ObjectMissing) as error:
        return {**row, "state": "unreadable", "why": str(error)}
    names = len({tensor.name for tensor in manifest.tensors})
    return {**row, "nbytes": manifest.nbytes, "ranks": manifest.world, "tensors": names}


def _averages(target: Target) -> list[dict[str, Any]]:
    prefix = keys.averages_prefix(target.run)
    found = []
    for info in target.store.list(prefix):
        label = info.key.removeprefix(prefix).partition("/")[0]
        if keys.place_of_manifest(info.key) is None:
            continue
        with suppress(ManifestInvalid, ObjectMissing):
            manifest = read_manifest(target.store, info.key)
            found.append(
                {
                    "label": label,
                    "step": manifest.step,
                    "attempt": manifest.attempt,
                    "of": [step for step, _ in manifest.average_of],
                    "nbytes": manifest.nbytes,
                    "committed_at": info.modified_at,
                }
            )
    return found


def description(target: Target, commit: CommitInfo) -> dict[str, Any]:
    """Tell of one checkpoint: what is in it, by group and by tensor, and its Python values."""
    from checkpointing.compare import python_values
    from checkpointing.tensors import whole_tensors

    manifest = manifest_of(target, commit)
    tensors = whole_tensors(manifest)
    groups: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        name = tensor.name.partition("/")[0]
        group = groups.setdefault(name, {"tensors": 0, "elements": 0, "nbytes": 0, "dtypes": []})
        group["tensors"] += 1
        group["elements"] += sum(piece.box.volume for piece in tensor.pieces)
        group["nbytes"] += tensor.nbytes
        if tensor.dtype not in group["dtypes"]:
            group["dtypes"].append(tensor.dtype)
    return {
        **target.about,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "committed_at": commit.committed_at,
        "age_s": None if commit.committed_at is None else time.time() - commit.committed_at,
        "key": commit.key,
        "ranks": manifest.world,
        "nbytes": manifest.nbytes,
        "average_of": [list(place) for place in manifest.average_of],
        "groups": [{"name": name, **group} for name, group in groups.items()],
        "values": dict(python_values(manifest.skeleton)),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "nbytes": tensor.nbytes,
                "pieces": len(tensor.pieces),
            }
            for tensor in tensors
        ],
    }


def in_use(target: Target) -> set[tuple[int, int]]:
    """Return what the run restores or has restored from, as its journal tells."""
    if target.directory is None:
        return set()
    state = state_in(target.directory)
    attempt = None if state.over else state.attempt
    if attempt is None or attempt.restore is None:
        return set()
    return {(attempt.restore.step, attempt.restore.attempt)}
