"""The environment of a rank: what torchrun sets, and where everstep's files are. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.store.base import StoreConfig
from checkpointing.tiers import Rhythm
from orchestrator.config import RunConfig
from orchestrator.core.actions import Source
from orchestrator.wire import StartNode


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPaths:
    """Files of one rank on its node."""

    slot: Path
    arena: Path
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the ranks of a run have in common, whatever the attempt."""

    run: str
    node: str
    argv: tuple[str, ...]
    workdir: Path
    env: Mapping[str, str]
    output_dir: Path
    store_json: str
    step_timeout_s: float
    init_timeout_s: float
    preload: tuple[str, ...] = ()
    rhythm: Rhythm = field(default_factory=Rhythm)
    stage_policy: str = "skip"
    stage_wait_s: float = 60.0
    on_other_world: str = "refuse"


def job_spec(config: RunConfig, node: str) -> JobSpec:
    """Return what the ranks of this run have in common on `node`."""
    store = config.checkpoint.store
    store_json = (
        StoreConfig(
            url=store,
            endpoint_url=config.checkpoint.endpoint_url,
            region=config.checkpoint.region,
            max_bytes_per_s=config.checkpoint.max_bytes_per_s,
        ).to_json()
        if store
        else ""
    )
    return JobSpec(
        run=config.run.name,
        node=node,
        argv=config.argv,
        workdir=config.job.workdir,
        env=config.job.env,
        output_dir=config.run_dir / "output",
        store_json=store_json,
        step_timeout_s=config.timeouts.step_s,
        init_timeout_s=config.timeouts.init_s,
        preload=config.job.preload,
        rhythm=config.checkpoint.rhythm,
        stage_policy=config.checkpoint.stage_policy,
        stage_wait_s=config.checkpoint.stage_wait,
        on_other_world=config.checkpoint.on_other_world,
    )


def common_environment(base: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """Return what the environments of all ranks of a node have in common."""
    return {
        **{k: v for k, v in base.items() if not k.startswith(("SUBMITIT_", "EVERSTEP_"))},
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",  # the last words of a killed rank must not die in a buffer
        **spec.env,
    }


def rank_environment(
    base: Mapping[str, str], spec: JobSpec, order: StartNode, local_rank: int, paths: RankPaths
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Source of the first block: torchrun's documented variables
    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
    """
    world = order.num_nodes * order.ranks
    rank = order.node_rank * order.ranks + local_rank
    return {
        **common_environment(base, spec),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(order.ranks),
        "GROUP_RANK": str(order.node_rank),
        "GROUP_WORLD_SIZE": str(order.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(order.attempt),
        "TORCHELASTIC_RUN_ID": f"{spec.run}-{order.attempt}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "EVERSTEP_RUN": spec.run,
        "EVERSTEP_ATTEMPT": str(order.attempt),
        "EVERSTEP_NODE": spec.node,
        "EVERSTEP_SLOT": str(paths.slot),
        "EVERSTEP_ARENA": str(paths.arena),
        "EVERSTEP_STORE": spec.store_json,
        "EVERSTEP_RESTORE": _restore_json(order),
        "EVERSTEP_OUTPUT": str(spec.output_dir),
        "EVERSTEP_STEP_TIMEOUT_S": f"{spec.step_timeout_s:g}",
        "EVERSTEP_STAGE_POLICY": spec.stage_policy,
        "EVERSTEP_STAGE_WAIT_S": f"{spec.stage_wait_s:g}",
        "EVERSTEP_ON_OTHER_WORLD": spec.on_other_world,
        "EVERSTEP_MEMORY_STEPS": str(spec.rhythm.memory),
        "EVERSTEP_PEER_STEPS": str(spec.rhythm.peer),
        "EVERSTEP_DISK_STEPS": str(spec.rhythm.disk),
        **spec.env,
    }


def _restore_json(order: StartNode) -> str:
    restore = order.restore
    if restore is None:
        return "null"
    # What lay elsewhere on the nodes is in the ranks' memory by now.
    source = Source.STORE if restore.source is Source.STORE else Source.MEMORY
    return json.dumps({"step": restore.step, "attempt": restore.attempt, "source": source.value})
