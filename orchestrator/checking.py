"""What `everstep checkpoints` does that reads the bytes of checkpoints."""

import getpass
import os
from pathlib import Path
from typing import Any, Literal

from checkpointing import keys
from checkpointing.compare import Kind, compare, compare_values
from checkpointing.quarantine import quarantine
from checkpointing.resolver import CommitInfo, read_catalogue, usable
from checkpointing.verify import verify
from orchestrator.catalogue import Target, manifest_of, newest, of_average, pick, told
from orchestrator.errors import NotFound


def check_all(
    target: Target, step: str | None, *, everything: bool, quarantines: bool
) -> dict[str, Any]:
    """Read and check one checkpoint, or all that are committed."""
    commits, spoilt = _all(target) if everything else (_few(target, step), ())
    found = []
    for commit in commits:
        with told():
            checked = verify(target.store, commit)
            if checked.problems and quarantines:
                quarantine(
                    target.store, target.run, *commit.place, why=checked.problems[0], who=_person()
                )
        found.append(
            {
                "step": checked.step,
                "attempt": checked.attempt,
                "nbytes": checked.nbytes,
                "tensors": checked.tensors,
                "problems": list(checked.problems),
                "quarantined": bool(checked.problems) and quarantines,
            }
        )
    for key in spoilt:  # of an old manifest that cannot be read the attempt is not known
        place = keys.place_of_manifest(key) or (0, None)
        row = {"step": place[0], "attempt": None, "nbytes": 0, "tensors": 0, "quarantined": False}
        found.append({**row, "problems": [f"{key}: cannot be read"]})
    return {**target.about, "checkpoints": found}


def _few(target: Target, step: str | None) -> list[CommitInfo]:
    """Return the one that is asked for, else the newest usable one behind those that are not."""
    if step is not None:
        return [pick(target, step)]
    with told():
        catalogue = read_catalogue(target.store, target.run)
        best = next(usable(target.store, catalogue), None)
    if best is None and not catalogue.commits:
        raise NotFound(f"{target.run}: no usable checkpoint in {target.url}")
    return [c for c in catalogue.commits if best is None or c.place >= best[0].place]


def _all(target: Target) -> tuple[list[CommitInfo], tuple[str, ...]]:
    with told():
        catalogue = read_catalogue(target.store, target.run)
    found = [*catalogue.commits, *catalogue.quarantined]
    if not found and not catalogue.unreadable:
        raise NotFound(f"{target.run}: no checkpoint in {target.url}")
    ordered = sorted(found, key=lambda commit: commit.place, reverse=True)
    return ordered, catalogue.unreadable


def differences(target: Target, steps: tuple[str, str] | None, subtree: str) -> dict[str, Any]:
    """Compare two checkpoints, older first unless given otherwise."""
    if steps is None:
        second, first = newest(target, 2)
    else:
        first, second = (manifest_of(target, pick(target, step, "--steps")) for step in steps)
    equal = 0
    found = []
    with told():
        for difference in compare(target.store, first, second, subtree):
            if difference.kind is Kind.EQUAL:
                equal += 1
                continue
            found.append(
                {
                    "name": difference.name,
                    "kind": difference.kind.value,
                    "detail": difference.detail,
                    "different_elements": difference.elements,
                    "elements": difference.total,
                    "max_abs": difference.max_abs,
                    "non_finite": difference.non_finite,
                }
            )
    values = () if subtree else compare_values(first.skeleton, second.skeleton)
    return {
        **target.about,
        "first": {"step": first.step, "attempt": first.attempt},
        "second": {"step": second.step, "attempt": second.attempt},
        "equal": equal,
        "tensors": sorted(found, key=lambda row: str(row["name"])),
        "values": [{"path": path, "first": one, "second": two} for path, one, two in values],
    }


def exported(
    target: Target,
    step: str | None,
    folder: Path,
    *,
    form: Literal["safetensors", "dcp"],
    subtree: str | None,
    strip: str,
    shard_bytes: int,
) -> dict[str, Any]:
    """Write a checkpoint to a folder."""
    from checkpointing.export import export_safetensors
    from checkpointing.export_dcp import export_dcp

    commit = pick(target, step)
    manifest = manifest_of(target, commit)
    with told():
        if form == "dcp":
            done = export_dcp(target.store, manifest, folder, subtree=subtree or "")
        else:
            done = export_safetensors(
                target.store,
                manifest,
                folder,
                subtree="model" if subtree is None else subtree,
                strip=strip,
                shard_bytes=shard_bytes,
            )
    return {
        **target.about,
        "step": commit.step,
        "attempt": commit.attempt,
        "format": form,
        "folder": str(done.folder),
        "files": list(done.files),
        "tensors": done.tensors,
        "nbytes": done.nbytes,
    }


def averaged(
    target: Target,
    last: int,
    label: str | None,
    *,
    dtype: str | None,
    subtree: str,
    scratch: Path | None,
) -> dict[str, Any]:
    """Average the weights of the newest steps, and keep the result in the store."""
    from checkpointing.averaging import average

    label = label or f"last-{last}"
    of_average(target, label)  # refuses what is no label
    manifests = newest(target, last)
    with told():
        made = average(
            target.store,
            target.run,
            manifests,
            label=label,
            subtree=subtree,
            dtype=dtype,
            scratch=scratch,
        )
    return {
        **target.about,
        "label": made.label,
        "step": manifests[0].step,
        "attempt": manifests[0].attempt,
        "of": [list(place) for place in made.of],
        "tensors": made.tensors,
        "copied": made.copied,
        "nbytes": made.outcome.nbytes,
        "already": made.outcome.already,
        "key": made.outcome.manifest_key,
    }


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in containers
        return f"uid {os.getuid()}"
