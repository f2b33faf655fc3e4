"""Errors that end a command with one line and a documented exit code.

EverstepError
+-- ConfigError          a key in the TOML or an argument is wrong        (2)
+-- PreconditionError    store, port, disk, script                        (3)
+-- AlreadyRunning       somebody else holds the lease                    (4)
+-- NotFound             no such run, no supervisor to talk to            (5)
+-- LeaseLost            deposed by a later supervisor: stop at once      (4)
+-- LedgerUnavailable    the ledger of nodes cannot be read or written    (3)
+-- CheckpointDamaged    a checkpoint's bytes are not what was committed  (8)
+-- JournalCorrupt       a damaged line that is not the last one          (70)
"""

from typing import ClassVar

from orchestrator.exit_codes import ExitCode


class EverstepError(Exception):
    """Root; the message is one line that names the key or thing and the fix."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class ConfigError(EverstepError):
    """The run's TOML or a command-line argument is wrong."""

    exit_code = ExitCode.USAGE


class PreconditionError(EverstepError):
    """Something outside the TOML is not usable: store, port, disk, script."""

    exit_code = ExitCode.PRECONDITION


class AlreadyRunning(EverstepError):
    """Another living supervisor holds the run's lease."""

    exit_code = ExitCode.ALREADY_RUNNING


class NotFound(EverstepError):
    """No such run, or no supervisor answers for it."""

    exit_code = ExitCode.NOT_FOUND


class LeaseLost(EverstepError):
    """A later supervisor took over; whoever sees this must write nothing more."""

    exit_code = ExitCode.ALREADY_RUNNING


class LedgerUnavailable(EverstepError):
    """The ledger of nodes cannot be read or written; what it says is unknown, not empty."""

    exit_code = ExitCode.PRECONDITION


class JournalCorrupt(EverstepError):
    """A line before the last one is damaged; nothing is repaired by itself."""


class CheckpointDamaged(EverstepError):
    """Bytes of a checkpoint, or what describes them, are not what was committed."""

    exit_code = ExitCode.DAMAGED
