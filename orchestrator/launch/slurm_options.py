"""What a site wants of an allocation, as the `[slurm]` table of a run's TOML says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Plain values for sbatch; "" leaves one to the cluster's default.

    Attributes:
        time_min: Time limit in minutes, 0 for the partition's default.
        warn_s: Agents get SIGUSR2 this many seconds before the time limit.
        options: Further long options of sbatch, without dashes; True for one without a value.
        prologue: Shell lines that the batch script runs before it starts the agents.
        export: Names or patterns of variables that the agents get besides the usual ones.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    exclude: str = ""
    time_min: int = 0
    warn_s: int = 120
    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    prologue: tuple[str, ...] = ()
    export: tuple[str, ...] = ()


# What an allocation of everstep stands on; a second value for one of them would break it.
RESERVED = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "gpus-per-node", "job-name"),
        *("comment", "no-kill", "kill-on-bad-exit", "requeue", "no-requeue", "output", "error"),
        *("open-mode", "input", "array", "chdir", "export", "export-file", "wrap", "wait"),
        *("parsable", "quiet", "test-only", "signal", "partition", "account", "qos"),
        *("reservation", "constraint", "exclude", "time", "hold"),
    }
)
