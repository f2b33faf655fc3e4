"""Submits a Slurm job in a short-lived child, which can be killed together with its sbatch.

The child has the allowed part of the environment, which Slurm takes over for the job. What it is to
do comes through its standard input: everybody on a machine can read command lines, and a prologue
may set secrets. Why Slurm said no, or nothing, is the last line that it leaves in its log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable, allowed

SUBMIT_TIMEOUT_S = 120.0
UNAVAILABLE_EXIT = 75  # sysexits.h, EX_TEMPFAIL: ask again


def submit_in_child(
    module: str,
    request: Mapping[str, Any],
    log: Path,
    *,
    export: Sequence[str] = (),
    keep: Sequence[int] = (),
) -> None:
    """Have a module's child do what the request says.

    Args:
        module: Run as `python -m`; reads the request with `request_given`.
        request: Plain JSON.
        log: Gets all that the child says, after what earlier ones said.
        export: Names or patterns of variables that it gets besides the usual ones.
        keep: File descriptors that it keeps open.

    Raises:
        SlurmUnavailable: It is not known whether there is a job now.
        SlurmRefused: There is none.
    """
    with log.open("a+b") as file:
        began = file.tell()
        code = _run(module, json.dumps(request).encode(), file.fileno(), export, keep)
        file.seek(began)
        lines = file.read().decode(errors="replace").split("\n")
    if code != 0:
        why = next((line for line in reversed(lines) if line.strip()), f"see {log}")
        raise (SlurmUnavailable if code == UNAVAILABLE_EXIT else SlurmRefused)(why.strip())


def _run(
    module: str, request: bytes, output: int, export: Sequence[str], keep: Sequence[int]
) -> int:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=allowed(os.environ, export),
        start_new_session=True,  # Ctrl-C is not for it
        pass_fds=keep,
    )
    try:
        child.communicate(request, SUBMIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise SlurmUnavailable(f"submitting took longer than {SUBMIT_TIMEOUT_S:g} s") from None
    return child.returncode


def request_given() -> Any:
    """Return, in the child, what it is to do."""
    return json.loads(sys.stdin.buffer.read())


@contextlib.contextmanager
def told_by_exit() -> Iterator[None]:
    """End the child so that `submit_in_child` raises what is raised in here."""
    try:
        yield
    except (SlurmUnavailable, SlurmRefused) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(UNAVAILABLE_EXIT if isinstance(error, SlurmUnavailable) else 1)
