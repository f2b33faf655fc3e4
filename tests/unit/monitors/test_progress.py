from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitors.progress.hang import Overdue, overdue
from monitors.progress.process import abnormal


@dataclass(frozen=True)
class Beat:
    step: int = 40
    phase: str = "step"
    phase_since: float = 100.0
    allowed_s: float = 10.0


def test_a_rank_is_overdue_only_beyond_what_its_phase_allows() -> None:
    assert overdue({0: Beat()}, now=110.0) == ()
    assert overdue({0: Beat()}, now=112.5) == (Overdue(rank=0, phase="step", step=40, for_s=2.5),)


def test_ranks_come_in_order_and_only_the_late_ones() -> None:
    late = overdue({3: Beat(), 1: Beat(phase_since=90.0), 2: Beat(phase_since=111.0)}, now=112.0)
    assert [o.rank for o in late] == [1, 3]


@pytest.mark.parametrize("allowed_s", [math.inf, math.nan])
def test_a_phase_without_a_bound_is_never_overdue(allowed_s: float) -> None:
    assert overdue({0: Beat(allowed_s=allowed_s)}, now=1e9) == ()


def test_a_rank_that_never_reported_is_unknown_and_not_hung() -> None:
    assert overdue({0: None}, now=1e9) == ()


@pytest.mark.parametrize(
    ("state", "expected"), [("T", "process is stopped"), ("S", ""), ("D", ""), ("R", "")]
)
def test_a_stopped_process_is_told_from_a_waiting_one(
    tmp_path: Path, state: str, expected: str
) -> None:
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "stat").write_text(f"77 (py) R (odd name) {state} 1 77 77 0 -1", encoding="utf-8")
    assert abnormal(77, proc=tmp_path) == expected


def test_a_process_that_is_gone_or_runs_is_not_abnormal(tmp_path: Path) -> None:
    assert abnormal(1, proc=tmp_path) == ""
    assert abnormal(os.getpid()) == ""
