"""A store that ignores the condition of a put is found out at the start, and only such a one."""

import shutil
from pathlib import Path

import pytest

from checkpointing.errors import ConditionalPutUnsupported
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from tests.faults.proxy import (
    Fault,
    FaultProxy,
    LoseAnswer,
    Reset,
    Rule,
    Say,
    TakeAll,
    expired_token,
    internal_error,
    slow_down,
)
from tests.integration.command_line import everstep

pytestmark = [pytest.mark.s3, pytest.mark.slow]

TOML = """\
[run]
name = "conditions"

[job]
command = ["true"]

[nodes]
count = 1

[checkpoint]
store = "{url}"
endpoint_url = "{endpoint}"
region = "us-east-1"
"""


@pytest.fixture
def plain(direct: StoreConfig) -> ObjectStore:
    return open_store(direct)


def test_a_store_that_ignores_conditions_is_refused_before_anything_starts(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.script(Rule(TakeAll(), "PutObject", times=10**6))
    with pytest.raises(ConditionalPutUnsupported, match="ignores If-None-Match"):
        open_store(behind).probe()
    assert plain.list("") == ()
    toml = tmp_path / "run.toml"
    toml.write_text(TOML.format(url=behind.url, endpoint=behind.endpoint_url))
    ended = everstep("run", toml, "--plain")
    assert ended.returncode != 0
    (line,) = ended.stderr.splitlines()
    assert "checkpoint.store" in line
    assert "ignores If-None-Match" in line
    assert not list(tmp_path.rglob("journal.jsonl")), "nothing was started"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.chaos), 1])
@pytest.mark.parametrize(
    "fault",
    [LoseAnswer(), slow_down(), internal_error(), Reset(), expired_token(), Say(409, "Conflict")],
    ids=["lost", "503", "500", "reset", "token", "409"],
)
def test_a_sound_store_is_never_taken_for_one_that_ignores_them(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, number: int, fault: Fault
) -> None:
    proxy.script(rule := Rule(fault, "PutObject", "probe", skip=number))
    open_store(behind).probe()
    assert rule.hits == 1
    assert plain.list("") == ()
