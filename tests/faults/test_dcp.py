"""DCP saves over a bad line: one clear error or the whole, and the save before stays readable."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.dcp import EverstepReader, EverstepWriter
from checkpointing.store.base import StoreConfig
from tests.faults.proxy import (
    Fault,
    FaultProxy,
    Hold,
    LoseAnswer,
    Reset,
    Rule,
    Say,
    Throttle,
    internal_error,
    slow_down,
)
from tests.integration.command_line import REPOSITORY

pytestmark = [
    pytest.mark.s3,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
WAIT_S = 60.0
FULL = pytest.mark.chaos  # the full loop
ALWAYS = 10**6


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1 << 18,), value)}, "step": int(value)}


def save(url: str, endpoint: str, value: float, deadline_s: float = WAIT_S) -> None:
    """Save to an id that may have a save."""
    writer = EverstepWriter(url, endpoint_url=endpoint, region="us-east-1", deadline_s=deadline_s)
    dcp.save(state(value), storage_writer=writer, no_dist=True)


def loaded(direct: StoreConfig) -> float:
    """Load what is there, around the proxy; return the one value that it holds."""
    into = state(0.0)
    reader = EverstepReader(
        f"{direct.url}/step", endpoint_url=direct.endpoint_url, region="us-east-1"
    )
    dcp.load(into, storage_reader=reader, no_dist=True)
    found: float = into["model"]["w"][0].item()
    assert (into["model"]["w"] == found).all()
    assert into["step"] == found
    return found


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Rule(slow_down(), "PutObject", times=2), id="503", marks=FULL),
        pytest.param(
            Rule(internal_error(), "PutObject", r"commits/"), id="500 of the commit", marks=FULL
        ),
        pytest.param(Rule(Reset(), "PutObject"), id="cut", marks=FULL),
        pytest.param(Rule(Reset(1000), "PutObject"), id="cut inside", marks=FULL),
        pytest.param(Rule(LoseAnswer(), "PutObject", r"commits/"), id="lost commit"),
        pytest.param(Rule(LoseAnswer(), "PutObject"), id="lost", marks=FULL),
        pytest.param(Rule(Throttle(5e5), times=ALWAYS), id="slow", marks=FULL),
    ],
)
def test_a_line_that_gets_better_costs_nothing_but_time(
    behind: StoreConfig, direct: StoreConfig, proxy: FaultProxy, rule: Rule
) -> None:
    save(f"{behind.url}/step", proxy.url, 1.0)
    proxy.script(rule)
    save(f"{behind.url}/step", proxy.url, 2.0)
    assert rule.hits > 0
    assert loaded(direct) == 2.0


@pytest.mark.parametrize(
    ("fault", "operation", "key", "says"),
    [
        pytest.param(slow_down(), "", "", r"SlowDown|not done within", id="503", marks=FULL),
        pytest.param(
            Reset(),
            "PutObject",
            r"commits/",
            r"[Cc]onnection|closed|not done within",
            id="cut commit",
        ),
        pytest.param(
            Say(403, "AccessDenied"), "PutObject", "", r"AccessDenied", id="denied", marks=FULL
        ),
        pytest.param(Throttle(1e4), "", "", r"not done within", id="too slow", marks=FULL),
    ],
)
def test_a_save_that_fails_says_why_and_leaves_the_one_before(
    behind: StoreConfig,
    direct: StoreConfig,
    proxy: FaultProxy,
    fault: Fault,
    operation: str,
    key: str,
    says: str,
) -> None:
    save(f"{behind.url}/step", proxy.url, 1.0)
    proxy.script(Rule(fault, operation, key, times=ALWAYS))
    with pytest.raises(CheckpointException, match=says) as failed:
        save(f"{behind.url}/step", proxy.url, 2.0, deadline_s=3.0)
    assert list(failed.value.failures) == [0]
    proxy.script()
    assert loaded(direct) == 1.0
    save(f"{behind.url}/step", proxy.url, 3.0)
    assert loaded(direct) == 3.0


@pytest.mark.parametrize(
    ("key", "after_server", "left"),
    [
        pytest.param("data", False, 1.0, id="before data", marks=FULL),
        pytest.param("data", True, 1.0, id="after data", marks=FULL),
        pytest.param("commits/", False, 1.0, id="before the commit"),
        pytest.param("commits/", True, 2.0, id="after the commit", marks=FULL),
    ],
)
def test_a_save_whose_process_is_killed_leaves_a_whole_one(
    behind: StoreConfig,
    direct: StoreConfig,
    proxy: FaultProxy,
    key: str,
    after_server: bool,
    left: float,
) -> None:
    save(f"{behind.url}/step", proxy.url, 1.0)
    hold = Hold(after_server)
    proxy.script(Rule(hold, "PutObject", key))
    command = ["-m", "tests.faults.dcp_saver", f"{behind.url}/step", proxy.url, "2"]
    saver = subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, env=dict(os.environ))
    try:
        assert hold.held.wait(WAIT_S)
    finally:
        saver.kill()
        saver.wait()
        proxy.script()
        hold.release.set()
    assert loaded(direct) == left
    save(f"{behind.url}/step", proxy.url, 3.0)
    assert loaded(direct) == 3.0
