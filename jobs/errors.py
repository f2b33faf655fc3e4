"""Errors of the job, each one clear line and its own exit code.

JobError
+-- UsageError           the flags, the data or the checkpoint do not fit together   exit 2
|   +-- DataError        the data is missing, empty, too short or of the wrong kind  exit 2
+-- OutputError          metrics.jsonl or final.json cannot be written               exit 1
+-- NonFiniteLoss        the loss or the gradients are not finite                    exit 3
"""

from typing import ClassVar


class JobError(Exception):
    """Root of the job's errors; the message is one line for a person."""

    exit_code: ClassVar[int] = 1


class UsageError(JobError):
    """What the caller asked for cannot be trained as asked."""

    exit_code: ClassVar[int] = 2


class DataError(UsageError):
    """The data is missing, empty, too short or not readable as tokens."""


class OutputError(JobError):
    """The folder for the run's outputs does not take what is written to it."""


class NonFiniteLoss(JobError):
    """The loss or the gradient norm became NaN or infinite; the weights were not touched."""

    exit_code: ClassVar[int] = 3
