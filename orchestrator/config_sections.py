"""The tables of a run's TOML, one model each: every key checked, values never change."""

import ipaddress
import itertools
import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    model_validator,
)

from checkpointing.tiers import Rhythm
from orchestrator.config_base import LIST, Folder, Seconds, Section, Steps
from orchestrator.config_keep import KeepSection
from orchestrator.config_watch import WatchSection
from orchestrator.launch.slurm_options import RESERVED, SlurmOptions

OWN_VARIABLES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
)


def _word(value: str) -> str:
    if "\0" in value:
        raise ValueError("no process can be given a NUL character")
    return value


def _variable_name(value: str) -> str:
    if not value or "=" in value:
        raise ValueError("no name of a variable: write one without '='")
    if value in OWN_VARIABLES or value.startswith("EVERSTEP_"):
        raise ValueError("everstep gives each rank its own; remove it")
    return _word(value)


Word = Annotated[str, AfterValidator(_word)]
VariableName = Annotated[str, AfterValidator(_variable_name)]


def is_reachable(host: str) -> bool:
    """Whether other machines may reach an address; True for names, which only a look-up tells."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host not in ("localhost", "")
    return not (address.is_loopback or address.is_unspecified)


class RunSection(Section):
    """`[run]`: identity. The name is also the prefix of the checkpoints in the store."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,46}[a-z0-9])?$")]
    dir: Folder = Path("runs")


# The last two are what the first step of torch's optimizers and of DDP imports late: 2 s.
PRELOAD = ("numpy", "torch", "torch.distributed.optim", "torch._dynamo")


class JobSection(Section):
    """`[job]`: what runs on every rank. A first word `python` means everstep's interpreter.

    `preload` names modules that each node imports once, before anything fails, so that a restart
    forks its ranks instead of importing again; an empty list starts every rank as a new program.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1, strict=False)]
    workdir: Folder = Path()
    env: dict[VariableName, Word] = Field(default_factory=dict)
    preload: Annotated[tuple[str, ...], LIST] = PRELOAD


class NodesSection(Section):
    """`[nodes]`: how many, and how they are got.

    With fewer than `count` left and no spare the run shrinks down to `min_count` nodes, or waits
    when that is `count`. `replace` asks for further nodes in place of those that are gone.
    """

    launcher: Literal["local", "slurm"] = "local"
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    spares: Annotated[int, Field(ge=0, le=10_000)] = 0
    min_count: Annotated[int, Field(ge=1, le=100_000)] | None = None
    replace: bool = True
    ranks_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    memory_dir: Folder = Path("/dev/shm")  # noqa: S108 - arenas must lie in memory

    @model_validator(mode="after")
    def _shrinks(self) -> Self:
        if self.min_count is not None and self.min_count > self.count:
            raise ValueError(
                f"min_count ({self.min_count}) must not be more than count ({self.count})"
            )
        return self


def _no_secret(value: str) -> str:
    if "@" in urlsplit(value).netloc:
        raise ValueError("holds credentials, and others see it; leave them to the environment")
    return value


def _store_url(value: str) -> str:
    parts = urlsplit(_no_secret(value))
    if parts.scheme == "s3" and parts.netloc:
        return value
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return value
    raise ValueError("write s3://bucket/prefix or file:///absolute/folder")


class CheckpointSection(Section):
    """`[checkpoint]`: where to, how often at first, and the limits of the tuner.

    `interval_steps` is the store's. Between two of its saves others may be made: every
    `memory_interval_steps` in the ranks' own memory, and the first of them at or after each
    multiple of `peer_interval_steps` is copied to another node's memory, of `disk_interval_steps`
    to `disk_dir`. A node copies at most `max_copy_bytes_per_s`.

    `stage_policy` says what a save does that finds the uploads before it still running: it is
    skipped, waits up to `stage_wait_s`, or takes the place of one that nobody began to send.
    `max_bytes_per_s` bounds what a node sends to the store. `on_other_world` says what becomes of
    the ranks' own state when another number of ranks goes on.
    """

    store: Annotated[str, AfterValidator(_store_url)] | None = None
    endpoint_url: Annotated[str, AfterValidator(_no_secret)] | None = None
    region: str | None = None
    interval_steps: Steps = 100
    memory_interval_steps: Steps | None = None
    peer_interval_steps: Annotated[int, Field(ge=0, le=10**12)] = 0
    disk_dir: Folder | None = None
    disk_interval_steps: Steps | None = None
    max_copy_bytes_per_s: Annotated[float, Field(ge=5e6, le=1e12)] = 1e9
    watch: WatchSection | None = None
    stage_policy: Literal["skip", "wait", "replace"] = "skip"
    stage_wait_s: Seconds | None = None
    max_bytes_per_s: Annotated[float, Field(ge=1, le=1e15)] | None = None
    on_other_world: Literal["refuse", "fresh"] = "refuse"
    keep: KeepSection | None = None
    tune: bool = True
    max_lost_work_s: Seconds = 1_800.0
    max_overhead: Annotated[float, Field(gt=0, lt=1)] = 0.02
    prior_faults_per_1000_node_days: Annotated[float, Field(gt=0, le=1e9)] = 24.0

    @model_validator(mode="after")
    def _has_tiers(self) -> Self:
        """Refuse intervals that mean nothing."""
        if self.disk_dir is not None and not self.disk_dir.is_absolute():
            raise ValueError("disk_dir must be absolute: a folder on a disk of every node")
        if self.disk_dir is None and self.disk_interval_steps is not None:
            raise ValueError("disk_interval_steps needs disk_dir; set that or remove it")
        memory, store = self.memory_interval_steps, self.interval_steps
        if memory is not None and memory > store:
            raise ValueError(
                f"memory_interval_steps ({memory}) must not be more than interval_steps ({store}): "
                "every save is in memory anyway; choose less, or a longer interval_steps"
            )
        if self.watch is not None and self.store is None:
            raise ValueError("watch needs store: where the folders are to go")
        return self

    @model_validator(mode="after")
    def _saves(self) -> Self:
        """Refuse what would have no effect."""
        if self.stage_wait_s is not None and self.stage_policy != "wait":
            raise ValueError('stage_wait_s is for stage_policy = "wait"; set that or remove it')
        if self.keep is not None and self.store is None:
            raise ValueError("keep needs a store; set checkpoint.store or remove it")
        return self

    @property
    def stage_wait(self) -> float:
        """For how long a save may wait for the uploads before it, in seconds."""
        return 60.0 if self.stage_wait_s is None else self.stage_wait_s

    @property
    def has_replicas(self) -> bool:
        """Whether snapshots are copied to other nodes or to disks."""
        return self.peer_interval_steps > 0 or self.disk_dir is not None

    @property
    def rhythm(self) -> Rhythm:
        """How often snapshots go elsewhere than to the store."""
        return Rhythm(
            memory=self.memory_interval_steps or 0,
            peer=self.peer_interval_steps,
            disk=(self.disk_interval_steps or 1) if self.disk_dir is not None else 0,
        )


class TimeoutsSection(Section):
    """`[timeouts]`: few numbers; the rest is derived (`everstep check` lists them)."""

    heartbeat_s: Seconds = 0.5
    agent_lost_s: Seconds = 15.0
    step_s: Seconds = 600.0
    init_s: Seconds = 1_800.0
    kill_grace_s: Seconds = 10.0
    launch_s: Seconds = 300.0
    start_s: Seconds = 60.0
    fetch_s: Seconds = 600.0
    stop_save_s: Seconds = 120.0
    final_upload_s: Seconds = 600.0
    supervisor_lost_s: Seconds = 86_400.0
    leave_s: Seconds = 25.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Refuse an order in which a slower watch could never be the first to see."""
        order = ("heartbeat_s", "agent_lost_s", "supervisor_lost_s")
        pairs = (*itertools.pairwise(order), ("heartbeat_s", "step_s"), ("kill_grace_s", "leave_s"))
        for low, high in pairs:
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} ({getattr(self, low):g}) must be less than "
                    f"{high} ({getattr(self, high):g})"
                )
        return self


class BudgetSection(Section):
    """`[budget]`: unforgiven incidents per class in a sliding window before a person is asked.

    A node with `node_strikes` incidents to its name in the window is excluded for `exclude_h`
    hours, but of all runs together at most `exclusion_limit` nodes in a window.
    """

    process: Annotated[int, Field(ge=0)] = 10
    node: Annotated[int, Field(ge=0)] = 10
    storage: Annotated[int, Field(ge=0)] = 3
    window_h: Annotated[float, Field(gt=0)] = 24.0
    same_root_limit: Annotated[int, Field(ge=1)] = 3
    node_strikes: Annotated[int, Field(ge=1)] = 2
    exclude_h: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0
    exclusion_limit: Annotated[int, Field(ge=0)] = 5


AUTO = "auto"


def _listening_host(value: str) -> str:
    try:
        is_everywhere = ipaddress.ip_address(value.strip("[]")).is_unspecified
    except ValueError:
        is_everywhere = value == ""
    if is_everywhere:
        raise ValueError(
            'no address that others could connect to: write "auto", or one of this machine\'s'
        )
    return value


class ServerSection(Section):
    """`[server]`: where agents and browsers find the supervisor; loopback unless told.

    `host = "auto"` is the address by which other nodes reach the machine that the supervisor runs
    on, found anew wherever it starts. It is the default with Slurm; `everstep submit` needs it.
    """

    host: Annotated[str, AfterValidator(_listening_host)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


def _sbatch_line(value: str) -> str:
    if "\n" in value or "\r" in value:
        raise ValueError("must be one line")
    if "\\" in value:
        raise ValueError("sbatch takes every backslash away; write it without")
    return _word(value)


def _sbatch_option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError("no long option of sbatch: write it without dashes in front")
    if name in RESERVED:
        raise ValueError(
            "everstep sets this option itself, from a key of its own or to a fixed value"
        )
    return name


def _sbatch_value(value: object) -> str | int | bool:
    if value is False:
        raise ValueError("an option that is not wanted is left out")
    if not isinstance(value, str | int):
        raise ValueError("must be true, a whole number or a text")
    return _sbatch_line(value) if isinstance(value, str) else value


SbatchValue = Annotated[str, AfterValidator(_sbatch_line)]
OptionName = Annotated[str, AfterValidator(_sbatch_option)]
# One validator and no union of types: that would turn an unwanted `false` into 0.
OptionValue = Annotated[str | int | bool, PlainValidator(_sbatch_value)]


class SupervisorSection(Section):
    """`[slurm.supervisor]`: the small job that `everstep submit` makes for the supervisor.

    `partition` and `account` are those of `[slurm]` unless given. With a time limit Slurm starts
    the job again when it is reached; the ranks go on meanwhile.
    """

    partition: SbatchValue = ""
    account: SbatchValue = ""
    qos: SbatchValue = ""
    reservation: SbatchValue = ""
    time_min: Annotated[int, Field(ge=10)] | None = None
    memory_mb: Annotated[int, Field(ge=256)] = 2_048
    cpus: Annotated[int, Field(ge=1, le=64)] = 1
    options: dict[OptionName, OptionValue] = Field(default_factory=dict)


class SlurmSection(Section):
    """`[slurm]`: what sbatch is told besides the shape of the run; "" is the cluster's default.

    With a time limit the agents are warned `warn_s` seconds before it: the run then saves and goes
    on in a new allocation. `options` are further long options of sbatch, `prologue` shell lines
    before the agents start, `export` names or patterns of variables that agents and ranks get of
    the supervisor's.
    """

    partition: SbatchValue = ""
    account: SbatchValue = ""
    qos: SbatchValue = ""
    reservation: SbatchValue = ""
    constraint: SbatchValue = ""
    exclude: SbatchValue = ""
    time_min: Annotated[int, Field(ge=1)] | None = None
    warn_s: Annotated[int, Field(ge=1, le=65_535)] = 120
    options: dict[OptionName, OptionValue] = Field(default_factory=dict)
    prologue: Annotated[tuple[Word, ...], LIST] = ()
    export: Annotated[tuple[VariableName, ...], LIST] = ()
    supervisor: SupervisorSection = SupervisorSection()

    def plain(self) -> SlurmOptions:
        """Return it as the launcher wants it."""
        values = self.model_dump(exclude={"supervisor"})
        return SlurmOptions(**{**values, "time_min": self.time_min or 0})

    def plain_supervisor(self) -> SlurmOptions:
        """Return what the supervisor's own job asks for; prologue and environment are shared."""
        own = self.supervisor
        return SlurmOptions(
            partition=own.partition or self.partition,
            account=own.account or self.account,
            qos=own.qos,
            reservation=own.reservation,
            time_min=own.time_min or 0,
            options={"mem": f"{own.memory_mb}M", "cpus-per-task": own.cpus, **own.options},
            prologue=self.prologue,
            export=self.export,
        )
