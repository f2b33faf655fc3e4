import json
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing.environment import RankEnvironment
from checkpointing.store.base import StoreConfig
from checkpointing.tiers import Rhythm
from orchestrator.agent.environment import JobSpec, RankPaths, rank_environment
from orchestrator.core.actions import Restore, Source
from orchestrator.wire import StartNode

SPEC = JobSpec(
    run="big",
    node="node7",
    argv=("true",),
    workdir=Path("/"),
    env={"NCCL_DEBUG": "WARN"},
    output_dir=Path("/runs/big/output"),
    store_json=StoreConfig(url="s3://b/p", endpoint_url="http://h:1", region="r").to_json(),
    step_timeout_s=600.0,
    init_timeout_s=1800.0,
)
ORDER = StartNode(
    attempt=3,
    node_rank=1,
    num_nodes=2,
    ranks=4,
    master_addr="10.0.0.1",
    master_port=29_500,
    restore=Restore(step=40, attempt=2, source=Source.MEMORY),
    interval_steps=10,
)
PATHS = RankPaths(slot=Path("/m/slot-6"), arena=Path("/m/arena-6"), log=Path("/l"))


def made(base: dict[str, str] | None = None, spec: JobSpec = SPEC) -> dict[str, str]:
    return rank_environment(base or {}, spec, ORDER, 2, PATHS)


def test_a_rank_gets_what_torchrun_sets() -> None:
    env = made()
    own = {name: value for name, value in env.items() if not name.startswith("EVERSTEP_")}
    assert {name: own[name] for name in own if "RANK" in name or "WORLD" in name} == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "6",
        "ROLE_WORLD_SIZE": "8",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert int(env["TORCHELASTIC_MAX_RESTARTS"]) >= 2
    assert env["TORCHELASTIC_RUN_ID"] == "big-3"
    assert env["ROLE_NAME"] == "default"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_every_attempt_has_its_own_run_id() -> None:
    again = rank_environment({}, SPEC, replace(ORDER, attempt=4), 2, PATHS)
    assert again["TORCHELASTIC_RUN_ID"] != made()["TORCHELASTIC_RUN_ID"]


def test_nothing_of_the_launcher_or_of_another_run_leaks_in() -> None:
    leaking = {
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_EXECUTOR": "local",
        "EVERSTEP_SLOT": "/other",
        "EVERSTEP_UNKNOWN": "x",
    }
    env = made({**leaking, "PATH": "/bin", "HOME": "/root"})
    assert not [name for name in env if name.startswith("SUBMITIT_")]
    assert "EVERSTEP_UNKNOWN" not in env
    assert env["EVERSTEP_SLOT"] == "/m/slot-6"
    assert (env["PATH"], env["HOME"]) == ("/bin", "/root")


@pytest.mark.parametrize(("base", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "7"}, "7")])
def test_a_rank_has_one_thread_unless_told(base: dict[str, str], threads: str) -> None:
    assert made(base)["OMP_NUM_THREADS"] == threads


def test_the_runs_own_variables_win() -> None:
    assert made({"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "WARN"


def test_checkpointing_reads_what_the_agent_wrote() -> None:
    read = RankEnvironment.read(made())
    assert read is not None
    assert (read.run, read.attempt, read.rank, read.world) == ("big", 3, 6, 8)
    assert (read.slot, read.arena) == (PATHS.slot, PATHS.arena)
    assert StoreConfig.from_json(read.store).endpoint_url == "http://h:1"
    assert json.loads(read.restore) == {"step": 40, "attempt": 2, "source": "memory"}
    assert read.step_timeout_s == 600.0


@pytest.mark.parametrize("source", [Source.PEER, Source.DISK])
def test_what_was_brought_is_restored_from_memory(source: Source) -> None:
    restore = Restore(step=40, attempt=2, source=source)
    spec = replace(SPEC, rhythm=Rhythm(memory=5, peer=10, disk=20))
    read = RankEnvironment.read(
        rank_environment({}, spec, replace(ORDER, restore=restore), 0, PATHS)
    )
    assert read is not None
    assert json.loads(read.restore)["source"] == "memory"
    assert read.rhythm == spec.rhythm


def test_a_fresh_start_and_a_run_without_a_store_are_said_so() -> None:
    env = rank_environment({}, replace(SPEC, store_json=""), replace(ORDER, restore=None), 0, PATHS)
    assert env["EVERSTEP_RESTORE"] == "null"
    assert env["EVERSTEP_STORE"] == ""
