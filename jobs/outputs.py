"""What a run leaves behind: metrics.jsonl, final.json at its end, and progress lines."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import OutputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished step, equal on every rank apart from its duration.

    Attributes:
        step: number of finished steps.
        loss: mean over all ranks, in nats per token.
        tokens: trained by the run so far.
        max_violation: worst layer's excess of its busiest expert over the mean load.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    max_violation: float
    step_s: float
    tokens: int


class Outputs:
    """The files and progress lines of rank 0; other ranks write nothing.

    Args:
        folder: created when missing.
        active: whether this rank writes.
        attempt: of the run, noted in each line of the metrics.
        steps: of the whole run.
        plain: one line for every ``log_every`` steps instead of one line that is rewritten.
        log_every: steps between two progress lines.
    """

    def __init__(
        self, folder: Path, *, active: bool, attempt: int, steps: int, plain: bool, log_every: int
    ) -> None:
        self._folder = folder
        self._active = active
        self._attempt = attempt
        self._steps = steps
        self._plain = plain or not sys.stderr.isatty()
        self._log_every = log_every
        if active:
            with _one_line(folder):
                folder.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._metrics = os.open(folder / "metrics.jsonl", flags, 0o644)
                self._end_torn_line()

    def record(self, record: StepRecord) -> None:
        """Append a finished step: a single write, so a kill tears at most the last line."""
        if not self._active:
            return
        fields: dict[str, Any] = {
            "attempt": self._attempt,
            "step": record.step,
            "loss": record.loss,
            "step_s": round(record.step_s, 6),
            "tokens": record.tokens,
            "at": time.time(),
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "max_violation": round(record.max_violation, 4),
        }
        with _one_line(self._folder):
            os.write(self._metrics, (json.dumps(fields) + "\n").encode())
        self._show(record)

    def finish(
        self, *, steps: int, loss: float | None, tokens: int, sha256: Mapping[str, str]
    ) -> None:
        """Write final.json: whole or not at all."""
        if not self._active:
            return
        final = {"steps": steps, "loss": loss, "tokens": tokens, "sha256": dict(sha256)}
        partial = self._folder / f".final.json.{os.getpid()}"
        with _one_line(self._folder), partial.open("w", encoding="utf-8") as file:
            json.dump(final, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / "final.json")
        if not self._plain:
            sys.stderr.write("\n")
        logger.info("finished %d steps; weights sha256 %s", steps, sha256["weights"])

    def close(self) -> None:
        """Close the metrics file."""
        if self._active:
            os.close(self._metrics)
            self._active = False

    def _show(self, record: StepRecord) -> None:
        text = (
            f"step {record.step}/{self._steps}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
            f"norm {record.grad_norm:.2f}  imbalance {record.max_violation:.2f}  "
            f"{record.step_s * 1000:.0f} ms"
        )
        if not self._plain:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
        elif record.step % self._log_every == 0 or record.step == self._steps:
            logger.info("%s", text)

    def _end_torn_line(self) -> None:
        """End the half line that a killed attempt may have left, so the next one stays whole."""
        size = os.fstat(self._metrics).st_size
        if size and os.pread(self._metrics, 1, size - 1) != b"\n":
            os.write(self._metrics, b"\n")


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be written: {error.strerror}; make room there or give this user "
            "write permission"
        ) from error
