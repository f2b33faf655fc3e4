"""A script that knows nothing of everstep is supervised all the same."""

from pathlib import Path

import pytest

from orchestrator.core.actions import Outcome
from tests.integration.conftest import MakeRun

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "data" / "ddp_plain.py"


def test_a_plain_ddp_script_is_restarted_when_a_rank_is_killed(make_run: MakeRun) -> None:
    run = make_run("plain", ["python", SCRIPT.name], spares=0, workdir=SCRIPT.parent)
    run.start()
    first_log = run.config.run_dir / "logs" / "attempt-0001" / "rank-00000.log"
    run.wait("its first output", lambda _: first_log.exists() and "step" in first_log.read_text())
    run.kill_rank(1)
    run.join()
    assert run.state.outcome is Outcome.FINISHED
    (incident,) = run.state.incidents
    assert (incident.fault, incident.rank) == ("rank_killed", 1)
    logs = run.config.run_dir / "logs" / "attempt-0002"
    texts = [path.read_text() for path in sorted(logs.glob("rank-*.log"))]
    assert len(texts) == 4
    assert all("done" in text for text in texts)
