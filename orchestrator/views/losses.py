"""The training job's own numbers: one JSON object a line, written by rank 0."""

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of one step as one attempt computed it."""

    attempt: int
    step: int
    loss: float
    at: float


def read_losses(path: Path) -> tuple[Loss, ...]:
    """Read `metrics.jsonl`; a file that is not there has no losses, a torn line is skipped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    found = (_parse(line) for line in lines)
    return tuple(loss for loss in found if loss is not None)


def by_attempt(losses: tuple[Loss, ...]) -> dict[int, list[tuple[int, float]]]:
    """Return the (step, loss) curve of each attempt."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for item in losses:
        curves.setdefault(item.attempt, []).append((item.step, item.loss))
    return curves


def kept_curve(losses: tuple[Loss, ...]) -> list[tuple[int, float]]:
    """Return one curve: each step as the last attempt that ran it has it."""
    newest = {item.step: item.loss for item in losses}
    return sorted(newest.items())


def _parse(line: str) -> Loss | None:
    try:
        row = json.loads(line)
        loss = Loss(
            attempt=int(row["attempt"]),
            step=int(row["step"]),
            loss=float(row["loss"]),
            at=float(row.get("at", math.nan)),
        )
    except (ValueError, TypeError, KeyError):
        return None
    return loss if math.isfinite(loss.loss) else None
