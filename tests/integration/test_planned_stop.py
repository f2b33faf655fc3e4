"""A planned stop of a script that saves but never looks at `should_stop`."""

import sys
from pathlib import Path

import pytest

from orchestrator.app import ask
from orchestrator.core.actions import Outcome
from tests.integration.conftest import MakeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = """
import time
import numpy as np
from checkpointing import Checkpointer

checkpointer = Checkpointer.from_env()
state = {"model": {"weights": np.zeros(10)}}
for step in range(checkpointer.restore(state), 100_000):
    time.sleep(0.02)
    checkpointer.step(step + 1, state)
"""


def test_a_script_that_ignores_a_stop_is_ended_once_it_has_saved(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "job.py"]
    run = make_run(
        "deaf", command, spares=0, ranks=1, interval=50, store=tmp_path / "store", workdir=tmp_path
    )
    run.start()
    run.wait("a checkpoint", lambda state: bool(state.commits))
    before = run.state.commits[0][0]
    ask(run.config.run_dir, "stop")
    run.wait("the end", lambda state: state.over)
    assert run.state.outcome is Outcome.STOPPED
    newest = run.state.commits[0][0]
    assert newest > before
    assert newest % 50, "saved for the stop, not by the interval"
    assert run.state.attempt is not None
    assert run.state.attempt.max_step - newest < 100, "not trained on for the whole stop_save_s"
