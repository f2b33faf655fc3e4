"""Calls of other programs: found also in the sbin folders, bounded in time, errors in one line."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from deploy.devcluster.errors import PreconditionError, ProgramFailed

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_S = 30.0


def find(program: str) -> str | None:
    """Return the full path of a program, or None; root's folders are searched for every user."""
    return shutil.which(program, path=f"{PATH}:{os.environ.get('PATH', '')}")


def found(program: str) -> str:
    """Return the full path of a program.

    Raises:
        PreconditionError: It is not installed.
    """
    path = find(program)
    if path is None:
        raise PreconditionError(f"the program {program} is not installed")
    return path


def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return its stdout.

    Args:
        argv: The program, looked up with `found`, and its arguments.
        stdin: Text for the program; None gives it an empty input.
        timeout_s: After so long it is killed.
        env: Added to the environment of this process.

    Raises:
        ProgramFailed: It ended with an error or took too long; carries its last line of stderr.
        PreconditionError: It is not installed.
    """
    try:
        done = subprocess.run(
            [found(argv[0]), *argv[1:]],
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(argv, f"no answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ProgramFailed(argv, f"{said} (exit {done.returncode})")
    return done.stdout


def become(argv: Sequence[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by a program; `env` is then its whole environment."""
    path = found(argv[0])
    os.execve(path, list(argv), dict(env if env is not None else os.environ))  # noqa: S606


def succeeds(argv: Sequence[str], *, stdin: str | None = None) -> bool:
    """Whether a program ends without an error; for probes and for removing what may be gone."""
    try:
        run(argv, stdin=stdin)
    except (ProgramFailed, PreconditionError):
        return False
    return True


def listens(port: int) -> bool:
    """Whether something on this machine listens at a TCP port; does not disturb it by connecting.

    Source: proc_pid_net(5): the second field is address:port in hexadecimal, the fourth the state,
    0A for listening.
    """
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False
