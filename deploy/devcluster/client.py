"""A devcluster from Python, for tests: its command line, and Slurm's, as a user has them."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from deploy.devcluster.errors import ProgramFailed
from deploy.devcluster.plan import ROOT
from deploy.devcluster.programs import run
from deploy.devcluster.units import python

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Devcluster:
    """A cluster by its name; making the object changes nothing.

    `with Devcluster("mine", "--nodes", "3") as cluster:` brings it up and takes it down.
    """

    def __init__(self, name: str, *up_options: str) -> None:
        self.name = name
        self._up_options = up_options

    @property
    def state(self) -> Path:
        """The cluster's folder; the nodes see it too."""
        return ROOT / self.name

    def __enter__(self) -> Self:
        self.do("up", *self._up_options)
        return self

    def __exit__(self, *_: object) -> None:
        self.do("down")

    def argv(self, command: str, *words: str) -> list[str]:
        """Return the full command line, to be started by the caller; `words` may hold a `--`."""
        return [*python("__main__"), command, "--name", self.name, *words]

    def attempt(self, command: str, *words: str) -> Done:
        """Run a command and say how it ended."""
        argv = self.argv(command, *words)
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        return Done(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def do(self, command: str, *words: str) -> str:
        """Run a command and return its stdout.

        Raises:
            ProgramFailed: It ended with an error; carries what it said.
        """
        done = self.attempt(command, *words)
        if done.code != 0:
            raise ProgramFailed(
                ["devcluster", command, *words], f"{done.stderr.strip()} (exit {done.code})"
            )
        return done.stdout

    def on(self, node: str, *argv: str) -> str:
        """Run a program on a node and return its stdout."""
        return self.do("shell", node, "--", *argv)

    def env(self) -> Mapping[str, str]:
        """Return the variables that a Slurm client on this machine needs."""
        variables: dict[str, str] = json.loads(self.do("env", "--json"))
        return variables

    def slurm(self, *argv: str) -> str:
        """Run a Slurm client on this machine and return its stdout."""
        return run(argv, env={**os.environ, **self.env()}, timeout_s=TIMEOUT_S)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return `status --json` of every node, by name."""
        shown = json.loads(self.do("status", "--json"))
        return {node["name"]: node for node in shown["nodes"]}
