"""The exit codes of `everstep`, one table for code, help text and documentation."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell, Slurm or systemd gets back."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    PRECONDITION = 3
    ALREADY_RUNNING = 4
    NOT_FOUND = 5
    STOPPED = 6
    DIFFERENT = 7
    DAMAGED = 8
    INTERNAL = 70
    INTERRUPTED = 130


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done; for `run`: the job finished",
    ExitCode.RUN_FAILED: "the run ended and needs a person; the reason was printed",
    ExitCode.USAGE: "wrong command line or wrong key in the TOML; nothing was started",
    ExitCode.PRECONDITION: "store, port, disk or script not usable; nothing was started",
    ExitCode.ALREADY_RUNNING: "another supervisor holds this run",
    ExitCode.NOT_FOUND: "no such run, node or checkpoint, or no supervisor is there",
    ExitCode.STOPPED: "stopped by the operator; the run can go on later",
    ExitCode.DIFFERENT: "`replay` came to another decision than the journal; `diff` differs",
    ExitCode.DAMAGED: "bytes of a checkpoint are not what was committed; they were named",
    ExitCode.INTERNAL: "a bug in everstep; the journal is intact",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); the ranks go on, run it again to adopt them",
}

# What `run` ends with, by the outcome of the run.
OUTCOME_CODE: dict[str, ExitCode] = {
    "finished": ExitCode.OK,
    "failed": ExitCode.RUN_FAILED,
    "stopped": ExitCode.STOPPED,
}

# Starting `run` again after one of these would change nothing, or undo what a person wants. After
# all others, and after an end by a signal, a run that lives is in need of a supervisor.
FINAL = frozenset(
    {
        ExitCode.OK,
        ExitCode.RUN_FAILED,
        ExitCode.USAGE,
        ExitCode.NOT_FOUND,
        ExitCode.STOPPED,
        ExitCode.INTERRUPTED,
    }
)
