"""A launcher without processes: nodes are names that live until a test ends them."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from monitors.observations import Observation, Ok, Unknown
from orchestrator.core.events import Ending
from orchestrator.launch.launcher import Allocation, AllocationSpec, LaunchRefusedError


@dataclass
class FakeLauncher:
    """Held to the contract of `Launcher` by `test_launcher`.

    Attributes:
        refusal: When set, what every submit is refused with.
        problem: When set, why nothing can be seen.
        held: Allocations that wait until they are released.
        leaving: Nodes that the site wants back, and why.
        ended: How allocations ended; one that was given back has completed.
    """

    refusal: str = ""
    problem: str = ""
    held: set[str] = field(default_factory=set)
    leaving: dict[str, str] = field(default_factory=dict)
    ended: dict[str, Ending] = field(default_factory=dict)
    _jobs: dict[str, str] = field(default_factory=dict)
    _nodes: dict[str, dict[str, bool]] = field(default_factory=dict)
    _names: "itertools.count[int]" = field(default_factory=itertools.count)

    def submit(self, spec: AllocationSpec) -> str:
        if self.refusal:
            raise LaunchRefusedError(self.refusal)
        if spec.key not in self._jobs:
            job = f"fake-{len(self._jobs) + 1}"
            self._jobs[spec.key] = job
            names = (name for n in self._names if (name := f"node{n}") not in spec.exclude)
            self._nodes[job] = dict.fromkeys(itertools.islice(names, spec.nodes), True)
        return self._jobs[spec.key]

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        at = time.time()
        if self.problem:
            return Unknown(why=self.problem, source="fake", at=at)
        nodes = {} if job in self.held else dict(self._nodes.get(job, {}))
        running = job in self.held or (job not in self.ended and any(nodes.values()))
        how = self.ended.get(job, Ending.FAILED if nodes else Ending.UNKNOWN)
        value = Allocation(
            job=job,
            running=running,
            nodes=nodes,
            queued="held" if job in self.held else "",
            held=job in self.held,
            leaving={name: why for name, why in self.leaving.items() if nodes.get(name)},
            ending=None if running else how,
        )
        return Ok(value=value, source="fake", at=at)

    def unhold(self, job: str, exclude: Sequence[str]) -> None:
        if job not in self.held:
            raise LaunchRefusedError(f"{job} is not held")
        self.held.remove(job)

    def cancel(self, job: str) -> None:
        for each in [job] if job else [*self._nodes]:
            if self._nodes.pop(each, None) is not None:
                self.ended.setdefault(each, Ending.COMPLETED)
            self.held.discard(each)

    def kill_node(self, node: str) -> None:
        """End a node of every allocation that has it, as a power failure does."""
        for nodes in self._nodes.values():
            if node in nodes:
                nodes[node] = False

    def allocations(self) -> int:
        """Return how many allocations there ever were."""
        return len(self._jobs)
