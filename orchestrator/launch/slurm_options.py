"""What a site wants of an allocation, as the `[slurm]` table of a run's TOML says it."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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

    def parameters(
        self, folder: Path, pickle: str, exclude: Iterable[str], **fixed: bool
    ) -> dict[str, Any]:
        """Return in submitit's words what all jobs have in common. Pure.

        Args:
            folder: The job's own, and the one that it runs in.
            pickle: Name of a file in it. Slurm may accept a job and not say so: then nobody
                names the pickle after the job's number, so the batch script does.
            exclude: Nodes that the job must not have, besides those of these options.
            fixed: Further options of sbatch that are not the site's to choose, with `_` for `-`.
        """
        link = f'ln -s {pickle} {shlex.quote(str(folder))}/"$SLURM_JOB_ID"_submitted.pkl'
        named = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclude": ",".join(filter(None, (self.exclude, *exclude))),
        }
        more = {"reservation": self.reservation} if self.reservation else {}
        return {
            **{key: value for key, value in named.items() if value},
            "ntasks_per_node": 1,
            "time": self.time_min or None,
            "wckey": None,  # else submitit's own name, which sites with wckeys refuse
            "additional_parameters": {
                **{name.replace("_", "-"): value for name, value in fixed.items()},
                "chdir": str(folder),
                # All of the child's environment, which is an allow-list. `--export=NAMES` would
                # have the node load a login environment, and keep from srun what the prologue
                # exports.
                "export": "ALL",
                **more,
                **self.options,
            },
            "setup": [f"{link} 2>/dev/null || true", *self.prologue],
        }


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
