"""What the installed torch really prints when a peer dies, read by the scanner and judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monitors.attribution import judge
from monitors.faults import Evidence, EvidenceKind, FaultKind, Verdict
from monitors.logs.scan import Scanner
from tests.ports import held_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

RANK = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(8)
for step in range(10_000):
    dist.all_reduce(value)
    value /= dist.get_world_size()
    if step == 20 and dist.get_rank() == 1:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("lr")
"""


def outcome(how: str, tmp_path: Path) -> Verdict:
    with held_port() as port:
        return outcome_at(port, how, tmp_path)


def outcome_at(port: int, how: str, tmp_path: Path) -> Verdict:
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with (tmp_path / f"rank{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen([sys.executable, "-c", RANK, how], env=env, stdout=log, stderr=log)
            )
    scanner = Scanner()
    evidence = []
    try:
        for rank, process in enumerate(ranks):
            status = process.wait(timeout=120)
            # The survivor is reported before the rank that died.
            at = float(rank)
            log_lines = (tmp_path / f"rank{rank}.log").read_bytes().splitlines()
            for number, line in enumerate(log_lines):
                if match := scanner.scan(line):
                    seq = 100 * rank + number
                    evidence.append(match.evidence(seq=seq, at=at, node="n1", rank=rank))
            evidence.append(
                Evidence(
                    seq=1000 + rank,
                    at=at,
                    kind=EvidenceKind.EXIT,
                    node="n1",
                    rank=rank,
                    code=status if status > 0 else None,
                    signal=-status if status < 0 else None,
                )
            )
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=10)
    return judge(evidence, world_size=2)


def test_a_killed_rank_is_named_from_what_gloo_prints(tmp_path: Path) -> None:
    verdict = outcome("kill", tmp_path)
    assert (verdict.fault, verdict.rank) == (FaultKind.RANK_KILLED, 1)


def test_a_raising_rank_is_named_from_what_gloo_prints(tmp_path: Path) -> None:
    verdict = outcome("raise", tmp_path)
    assert (verdict.fault, verdict.rank) == (FaultKind.RANK_CRASHED, 1)
    assert "KeyError: 'lr'" in verdict.cause
