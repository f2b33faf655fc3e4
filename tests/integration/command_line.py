"""The command line as a shell has it: arguments in, exit code and text out."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120.0


def python(
    *arguments: str | Path, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a module of this repository to its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def everstep(
    *arguments: str | Path, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `everstep ARGUMENTS` to its end."""
    return python("-m", "orchestrator", *arguments, env=env)
