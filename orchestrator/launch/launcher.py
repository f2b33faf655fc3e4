"""The seam between the supervisor and whatever hands out nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from monitors.observations import Observation
from orchestrator.core.events import Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSpec:
    """One allocation of equal nodes with one agent each.

    Attributes:
        key: Idempotency key; a second submit with the same key finds the first.
        name: Job name, for people.
        nodes: Nodes of the world plus spares.
        gpus_per_node: 0 for none.
        exclude: Names of nodes that must not be given. Those that the run has and keeps belong to
            them: Slurm may put two allocations on one node, and a node has one agent.
        run_dir: Where the agents find everything else.
        entry: `module:function` that each node calls with the run directory. A name, not an
            import: the launcher knows nothing of what it starts.
    """

    key: str
    name: str
    nodes: int
    gpus_per_node: int
    run_dir: Path
    exclude: tuple[str, ...] = ()
    entry: str = "orchestrator.agent.task:run_agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What the launcher says of an allocation.

    Attributes:
        job: The launcher's id for it.
        running: Whether it exists: has nodes, or waits for them.
        nodes: `True` for a node whose agent runs, `False` for one whose agent is known to be
            gone. A node that is missing here is one the launcher cannot tell about.
        queued: Why it has no nodes yet, "" when it had some; who waits for them is not late.
        held: It waits, and will go on waiting until `Launcher.unhold`.
        leaving: Nodes of it that the site wants back, and why: drained, to be rebooted, reserved
            for maintenance. They still work.
        ending: How it ended, None while it lives; `Ending.UNKNOWN` while that cannot be told.
        why: Why it ended so, for a person; "" when the ending says it all.
    """

    job: str
    running: bool
    nodes: Mapping[str, bool]
    queued: str = ""
    held: bool = False
    leaving: Mapping[str, str] = field(default_factory=dict)
    ending: Ending | None = None
    why: str = ""


class LaunchRefusedError(Exception):
    """The launcher said no; the message is one line with its reason."""


class LaunchUnknownError(Exception):
    """No answer came: it may be done or not; asking the same again is safe. One line says why."""


class Launcher(Protocol):
    """Gets nodes and says what became of them. Calls may block; each has its own timeout."""

    def submit(self, spec: AllocationSpec) -> str:
        """Ask for the allocation, or find the one asked for under the same key.

        Returns:
            The job id.

        Raises:
            LaunchRefusedError: It will not be granted.
            LaunchUnknownError: Whether it was asked for is not known.
        """
        ...

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        """Say what is known of the allocation now; a failed look is Unknown, never gone.

        Args:
            job: What `submit` returned.
            fresh: An answer from a moment ago will not do.
        """
        ...

    def unhold(self, job: str, exclude: Sequence[str]) -> None:
        """Let an allocation that is held after a failed launch try again, on other nodes.

        Raises:
            LaunchRefusedError: It stays as it is.
            LaunchUnknownError: Whether it was let go is not known.
        """
        ...

    def cancel(self, job: str) -> None:
        """Give the allocation back; repeated calls and unknown jobs are no error.

        Args:
            job: What `submit` returned; "" for all allocations of the run, those included whose
                `submit` was given up and came through all the same.
        """
        ...
