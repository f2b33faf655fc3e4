import json
import math
from typing import Any

import pytest

from orchestrator import wire
from orchestrator.core import events as ev
from orchestrator.core.actions import Restore, Source
from orchestrator.core.codec import CodecError

SHARD = ev.StagedShard(rank=1, step=40, attempt=2)
RANK = wire.RankReport(
    rank=1,
    step=-1,
    phase="init",
    phase_age_s=0.5,
    allowed_s=math.inf,
    loss=1.5,
    step_s=0.25,
    stall_s=0.0,
    saves=1,
    skipped_saves=0,
    tokens=2**60,
    abnormal="process is stopped",
)
START = wire.StartNode(
    attempt=3,
    node_rank=1,
    num_nodes=2,
    ranks=4,
    master_addr="10.0.0.1",
    master_port=29_500,
    restore=Restore(step=40, attempt=2, source=Source.MEMORY),
    interval_steps=10,
)
FROM_AGENT: list[wire.FromAgent] = [
    wire.Hello(
        node="n",
        incarnation="i",
        pid=1,
        address="a",
        metrics_url="u",
        attempt=0,
        staged=(SHARD,),
    ),
    wire.Report(attempt=1, ranks=(RANK,)),
    wire.Report(attempt=0, ranks=()),
    wire.Fact(n=1, event=ev.RanksStarted(attempt=1, node="n", ranks=(0, 1), pids=(10, 11))),
    wire.Fact(n=2, event=ev.RanksGone(attempt=1, node="n")),
    wire.Fact(n=3, event=ev.RankExited(attempt=1, node="n", rank=0, code=-9, ours=True)),
    wire.Fact(n=4, event=ev.Staged(node="n", shards=(SHARD, SHARD))),
    wire.Fact(n=5, event=ev.UploadFailed(attempt=1, step=4, rank=0, error="\u00e4\n\x00")),
    wire.Outcome(key="k", ok=False, detail="no"),
]
FROM_SUPERVISOR: list[wire.FromSupervisor] = [
    wire.Welcome(epoch=2, acked=7, attempt=0),
    wire.Ack(n=7),
    wire.Order(key="k", epoch=1, body=START),
    wire.Order(key="k", epoch=1, body=wire.ReservePort(attempt=1)),
    wire.Order(key="k", epoch=1, body=wire.Control(attempt=1, snapshot_step=9)),
    wire.Order(key="k", epoch=1, body=wire.Shutdown(grace_s=math.inf)),
    wire.Order(
        key="k",
        epoch=1,
        body=wire.StopNode(attempt=1, planned=True, stop_step=4, save_s=1.0, grace_s=0.5),
    ),
]


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda m: type(m).__name__)
def test_what_an_agent_says_arrives_as_it_was(message: wire.FromAgent) -> None:
    assert wire.unpack_from_agent(wire.pack(message)) == message


@pytest.mark.parametrize("message", FROM_SUPERVISOR, ids=lambda m: type(m).__name__)
def test_what_a_supervisor_says_arrives_as_it_was(message: wire.FromSupervisor) -> None:
    assert wire.unpack_from_supervisor(wire.pack(message)) == message


def test_a_number_that_was_not_measured_stays_unmeasured() -> None:
    report = wire.Report(
        attempt=1,
        ranks=(
            wire.RankReport(
                rank=0,
                step=1,
                phase="step",
                phase_age_s=0.0,
                allowed_s=math.nan,
                loss=math.nan,
                step_s=math.nan,
                stall_s=math.nan,
                saves=0,
                skipped_saves=0,
                tokens=0,
            ),
        ),
    )
    text = wire.pack(report)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    read = wire.unpack_from_agent(text)
    assert isinstance(read, wire.Report)
    assert math.isnan(read.ranks[0].loss)
    assert math.isnan(read.ranks[0].allowed_s)


@pytest.mark.parametrize("message", FROM_SUPERVISOR, ids=lambda m: type(m).__name__)
def test_an_agent_cannot_say_what_only_a_supervisor_says(message: wire.FromSupervisor) -> None:
    with pytest.raises(CodecError):
        wire.unpack_from_agent(wire.pack(message))


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda m: type(m).__name__)
def test_a_supervisor_cannot_say_what_only_an_agent_says(message: wire.FromAgent) -> None:
    with pytest.raises(CodecError):
        wire.unpack_from_supervisor(wire.pack(message))


def test_an_agent_reports_no_decisions() -> None:
    forged = {"is": "Fact", "n": 1, "event": {"is": "ActionDone", "key": "k", "ok": True}}
    with pytest.raises(CodecError, match="ActionDone"):
        wire.unpack_from_agent(json.dumps(forged))


GARBAGE: list[Any] = [
    "",
    "{",
    "null",
    "[]",
    "7",
    '"Ack"',
    "{}",
    '{"is": "Nothing"}',
    '{"is": 7}',
    '{"is": ["Outcome"]}',
    '{"is": "Outcome"}',
    '{"is": "Outcome", "key": "k", "ok": 1}',
    '{"is": "Outcome", "key": "k", "ok": true, "more": 1}',
    '{"is": "Report", "attempt": 1.0, "ranks": []}',
    '{"is": "Report", "attempt": true, "ranks": []}',
    '{"is": "Report", "attempt": 1, "ranks": {}}',
    '{"is": "Report", "attempt": 1, "ranks": [null]}',
    '{"is": "Fact", "n": 1, "event": null}',
    '{"is": "Fact", "n": 1, "event": {"is": "Staged", "node": "n", "shards": [{}]}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: text[:40])
def test_garbage_is_refused_and_nothing_else_happens(text: str) -> None:
    with pytest.raises(CodecError):
        wire.unpack_from_agent(text)
    with pytest.raises(CodecError):
        wire.unpack_from_supervisor(text)
