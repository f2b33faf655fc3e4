"""The run's TOML: one file per run, every key checked, every error naming the key and the fix."""

import hashlib
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from orchestrator.config_base import Section
from orchestrator.config_sections import (
    AUTO,
    BudgetSection,
    CheckpointSection,
    JobSection,
    NodesSection,
    RunSection,
    ServerSection,
    SlurmSection,
    TimeoutsSection,
    is_reachable,
)
from orchestrator.core.policy import Policy
from orchestrator.errors import ConfigError, NotFound


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

    @model_validator(mode="before")
    @classmethod
    def _default_host(cls, raw: Any) -> Any:
        """Let nodes that are other machines find the supervisor without being told."""
        match raw:
            case {"nodes": {"launcher": "slurm"}, "server": {**server}}:
                return {**raw, "server": {"host": AUTO, **server}}
            case {"nodes": {"launcher": "slurm"}} if "server" not in raw:
                return {**raw, "server": {"host": AUTO}}
        return raw

    @model_validator(mode="after")
    def _fits_the_launcher(self) -> Self:
        """Refuse what cannot work with nodes that are other machines."""
        if self.nodes.launcher == "slurm" and not is_reachable(self.server.host):
            raise ValueError(
                f"server.host: {self.server.host} cannot be reached from other nodes; write "
                '"auto", or an address of this machine that Slurm\'s nodes can connect to'
            )
        if self.nodes.launcher != "slurm" and self.server.host == AUTO:
            raise ValueError('server.host: "auto" is for nodes.launcher = "slurm"; remove it')
        if self.nodes.launcher != "slurm" and self.slurm != SlurmSection():
            raise ValueError(
                'slurm: only read with nodes.launcher = "slurm"; set that or remove it'
            )
        watch = self.checkpoint.watch
        if watch is not None and watch.shared is None and self.nodes.count > 1:
            raise ValueError(
                "checkpoint.watch.shared: say true when all nodes see the same dir, "
                "false when each has its own"
            )
        return self

    @model_validator(mode="after")
    def _has_buddies(self) -> Self:
        """Refuse copies between nodes where there is one: its spares keep no memory of it."""
        if self.checkpoint.peer_interval_steps and self.nodes.count == 1:
            raise ValueError(
                "checkpoint.peer_interval_steps: copies go to another node that trains, and "
                "nodes.count is 1; set it to 2 or more, or remove peer_interval_steps"
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
            exclude_s=budget.exclude_h * 3600.0,
            exclusion_limit=budget.exclusion_limit,
            min_nodes=self.nodes.min_count or self.nodes.count,
            replace_nodes=self.nodes.replace,
            tune_interval=self.checkpoint.tune and self.checkpoint.store is not None,
            max_lost_work_s=self.checkpoint.max_lost_work_s,
            max_overhead=self.checkpoint.max_overhead,
            prior_per_1000_node_days=self.checkpoint.prior_faults_per_1000_node_days,
            memory_interval_steps=self.checkpoint.memory_interval_steps or 0,
            peers=self.checkpoint.peer_interval_steps > 0,
            fetch_timeout_s=times.fetch_s,
            watches=self.checkpoint.watch is not None,
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
    if config.nodes.launcher == "slurm":
        _check_slurm_reads(base / config.run.dir, path)
    checkpoint, watch = config.checkpoint, config.checkpoint.watch
    if watch is not None:
        watch = watch.model_copy(update={"dir": base / watch.dir})
        checkpoint = checkpoint.model_copy(update={"watch": watch})
    return config.model_copy(
        update={
            "checkpoint": checkpoint,
            "run": config.run.model_copy(update={"dir": base / config.run.dir}),
            "job": config.job.model_copy(update={"workdir": base / config.job.workdir}),
            "nodes": config.nodes.model_copy(update={"memory_dir": base / config.nodes.memory_dir}),
        }
    )


def _check_slurm_reads(folder: Path, path: Path) -> None:
    """Refuse a directory that sbatch would not take as it is, but fill in (%u) or shorten."""
    text = str(folder)
    if any(mark in text for mark in "%\\") or not text.isprintable():
        raise ConfigError(
            f"{path}: run.dir: {text!r}: Slurm reads %, backslashes and control characters in a "
            "path as something else; choose a directory without"
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
