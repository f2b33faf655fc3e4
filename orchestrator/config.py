"""The run's TOML: one file per run, every key checked, every error naming the key and the fix."""

import hashlib
import ipaddress
import itertools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from orchestrator.core.policy import Policy
from orchestrator.errors import ConfigError, NotFound
from orchestrator.launch.slurm_options import RESERVED, SlurmOptions

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]


class Section(BaseModel):
    """A table of the TOML: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    dir: Path = Path("runs")


# The last two are what the first step of torch's optimizers and of DDP imports late: 2 s.
PRELOAD = ("numpy", "torch", "torch.distributed.optim", "torch._dynamo")


class JobSection(Section):
    """`[job]`: what runs on every rank. A first word `python` means everstep's interpreter.

    `preload` names modules that each node imports once, before anything fails, so that a restart
    forks its ranks instead of importing again; an empty list starts every rank as a new program.
    """

    command: Annotated[tuple[Word, ...], Field(min_length=1)]
    workdir: Path = Path()
    env: dict[VariableName, Word] = {}
    preload: tuple[str, ...] = PRELOAD


class NodesSection(Section):
    """`[nodes]`: how many, and how they are got."""

    launcher: Literal["local", "slurm"] = "local"
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    spares: Annotated[int, Field(ge=0, le=10_000)] = 0
    ranks_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    memory_dir: Path = Path("/dev/shm")  # noqa: S108 - arenas must lie in memory


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
    """`[checkpoint]`: where to, how often at first, and the limits of the tuner."""

    store: Annotated[str, AfterValidator(_store_url)] | None = None
    endpoint_url: Annotated[str, AfterValidator(_no_secret)] | None = None
    region: str | None = None
    interval_steps: Annotated[int, Field(ge=1, le=10**12)] = 100
    tune: bool = True
    max_lost_work_s: Seconds = 1_800.0
    max_overhead: Annotated[float, Field(gt=0, lt=1)] = 0.02
    prior_faults_per_1000_node_days: Annotated[float, Field(gt=0, le=1e9)] = 24.0


class TimeoutsSection(Section):
    """`[timeouts]`: few numbers; the rest is derived (`everstep check` lists them)."""

    heartbeat_s: Seconds = 0.5
    agent_lost_s: Seconds = 15.0
    step_s: Seconds = 600.0
    init_s: Seconds = 1_800.0
    kill_grace_s: Seconds = 10.0
    launch_s: Seconds = 300.0
    start_s: Seconds = 60.0
    stop_save_s: Seconds = 120.0
    final_upload_s: Seconds = 600.0
    supervisor_lost_s: Seconds = 86_400.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Refuse an order in which a slower watch could never be the first to see."""
        order = ("heartbeat_s", "agent_lost_s", "supervisor_lost_s")
        for low, high in (*itertools.pairwise(order), ("heartbeat_s", "step_s")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} ({getattr(self, low):g}) must be less than "
                    f"{high} ({getattr(self, high):g})"
                )
        return self


class BudgetSection(Section):
    """`[budget]`: unforgiven incidents per class in a sliding window before a person is asked."""

    process: Annotated[int, Field(ge=0)] = 10
    node: Annotated[int, Field(ge=0)] = 10
    storage: Annotated[int, Field(ge=0)] = 3
    window_h: Annotated[float, Field(gt=0)] = 24.0
    same_root_limit: Annotated[int, Field(ge=1)] = 3
    node_strikes: Annotated[int, Field(ge=1)] = 2


class ServerSection(Section):
    """`[server]`: where agents and browsers find the supervisor; loopback unless told."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


def _sbatch_line(value: str) -> str:
    if "\n" in value or "\r" in value:
        raise ValueError("must be one line")
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


class SlurmSection(Section):
    """`[slurm]`: what sbatch is told besides the shape of the run; "" is the cluster's default.

    `options` are further long options of sbatch, `prologue` shell lines before the agents start,
    `export` names or patterns of variables that agents and ranks get of the supervisor's.
    """

    partition: SbatchValue = ""
    account: SbatchValue = ""
    qos: SbatchValue = ""
    reservation: SbatchValue = ""
    constraint: SbatchValue = ""
    exclude: SbatchValue = ""
    time_min: Annotated[int, Field(ge=1)] | None = None
    options: dict[OptionName, OptionValue] = {}
    prologue: tuple[Word, ...] = ()
    export: tuple[VariableName, ...] = ()

    def plain(self) -> SlurmOptions:
        """Return it as the launcher wants it."""
        return SlurmOptions(**{**self.model_dump(), "time_min": self.time_min or 0})


class RunConfig(Section):
    """A whole run file."""

    run: RunSection
    job: JobSection
    nodes: NodesSection = NodesSection()
    checkpoint: CheckpointSection = CheckpointSection()
    timeouts: TimeoutsSection = TimeoutsSection()
    budget: BudgetSection = BudgetSection()
    server: ServerSection = ServerSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _fits_the_launcher(self) -> Self:
        """Refuse what cannot work with nodes that are other machines."""
        if self.nodes.launcher == "slurm" and not is_reachable(self.server.host):
            raise ValueError(
                f"server.host: {self.server.host} cannot be reached from other nodes; give the "
                "address of this machine that Slurm's nodes can connect to"
            )
        if self.nodes.launcher != "slurm" and self.slurm != SlurmSection():
            raise ValueError(
                'slurm: only read with nodes.launcher = "slurm"; set that or remove it'
            )
        return self

    @property
    def run_dir(self) -> Path:
        """The run's own directory."""
        return self.run.dir / self.run.name

    @property
    def memory_root(self) -> Path:
        """Where this run's nodes on this machine keep slots and arenas; no two runs share one."""
        run = hashlib.sha256(str(self.run_dir.resolve()).encode()).hexdigest()[:10]
        return self.nodes.memory_dir / f"everstep-{os.getuid()}-{run}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The ranks' command with the interpreter filled in."""
        first, *rest = self.job.command
        return (sys.executable if first in ("python", "python3") else first, *rest)

    def policy(self) -> Policy:
        """Return the limits for the rules as plain values."""
        times, budget = self.timeouts, self.budget
        return Policy(
            launch_timeout_s=times.launch_s,
            start_timeout_s=times.start_s,
            kill_grace_s=times.kill_grace_s,
            stop_save_s=times.stop_save_s,
            final_upload_s=times.final_upload_s,
            budget={
                "process": budget.process,
                "node": budget.node,
                "storage": budget.storage,
            },
            budget_window_s=budget.window_h * 3600.0,
            same_root_limit=budget.same_root_limit,
            node_strikes=budget.node_strikes,
            tune_interval=self.checkpoint.tune and self.checkpoint.store is not None,
            max_lost_work_s=self.checkpoint.max_lost_work_s,
            max_overhead=self.checkpoint.max_overhead,
            prior_per_1000_node_days=self.checkpoint.prior_faults_per_1000_node_days,
        )


def load(path: Path) -> RunConfig:
    """Read a run file; relative paths in it are relative to the file.

    Raises:
        NotFound: There is no such file.
        ConfigError: Not TOML, or a key is missing, unknown or wrong; one line names it.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    config = parse(raw, str(path))
    base = path.resolve().parent
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": base / config.run.dir}),
            "job": config.job.model_copy(update={"workdir": base / config.job.workdir}),
            "nodes": config.nodes.model_copy(update={"memory_dir": base / config.nodes.memory_dir}),
        }
    )


def parse(raw: dict[str, Any], name: str) -> RunConfig:
    """Check a run file's content; raises ConfigError with one line for the first mistake."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{name}: {_first_of(error)}") from None


def _first_of(error: ValidationError) -> str:
    """Return the first mistake with its key and its fix, in one line."""
    first, more = error.errors()[0], len(error.errors()) - 1
    parts = (str(part) for part in first["loc"] if part not in ("", "[key]"))
    key = ".".join(parts) or "the file"
    text = f"{key}: {_fix(first)}"
    text = text.removeprefix("the file: ") if first["type"] == "value_error" else text
    return f"{text} (and {more} more)" if more else text


FIXES = {
    "extra_forbidden": "unknown key; remove it or correct its spelling",
    "missing": "missing; add it",
    "tuple_type": 'write a list, as ["python", "train.py"]',
}


def _fix(error: Any) -> str:
    kind, given = error["type"], error.get("input")
    if kind in FIXES:
        return FIXES[kind]
    if kind == "string_pattern_mismatch":
        return f"{given!r}: use lower-case letters, digits, '.', '_' or '-', at most 48"
    message = error["msg"].removeprefix("Value error, ")
    is_shown = not isinstance(given, dict) and "@" not in str(given)  # perhaps a secret
    shown = f" (got {given!r})" if is_shown else ""
    return f"{message[0].lower()}{message[1:]}{shown}"


def freeze(config: RunConfig, path: Path) -> None:
    """Write the effective configuration, all paths absolute, for agents and later supervisors."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)  # the ranks' environment may hold secrets
    temporary.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(path)


def thaw(path: Path) -> RunConfig:
    """Read what `freeze` wrote; raises NotFound or ConfigError."""
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file; is this a run directory?") from error
    except ValidationError as error:
        text = f"{path}: written by another version of everstep: {_first_of(error)}"
        raise ConfigError(text) from error
