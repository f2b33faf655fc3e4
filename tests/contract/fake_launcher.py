"""A launcher without processes: nodes are names that live until a test ends them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from monitors.observations import Observation, Ok, Unknown
from orchestrator.launch.launcher import Allocation, AllocationSpec, LaunchRefusedError


@dataclass
class FakeLauncher:
    """Held to the contract of `Launcher` by `test_launcher`.

    Attributes:
        refusal: When set, what every submit is refused with.
        problem: When set, why nothing can be seen.
    """

    refusal: str = ""
    problem: str = ""
    _jobs: dict[str, str] = field(default_factory=dict)
    _nodes: dict[str, dict[str, bool]] = field(default_factory=dict)

    def submit(self, spec: AllocationSpec) -> str:
        if self.refusal:
            raise LaunchRefusedError(self.refusal)
        if spec.key not in self._jobs:
            job = f"fake-{len(self._jobs) + 1}"
            self._jobs[spec.key] = job
            self._nodes[job] = {f"node{n}": True for n in range(spec.nodes)}
        return self._jobs[spec.key]

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        at = time.time()
        if self.problem:
            return Unknown(why=self.problem, source="fake", at=at)
        nodes = dict(self._nodes.get(job, {}))
        value = Allocation(job=job, running=any(nodes.values()), nodes=nodes)
        return Ok(value=value, source="fake", at=at)

    def unhold(self, job: str, exclude: Sequence[str]) -> None:
        raise LaunchRefusedError(f"{job} is not held")

    def cancel(self, job: str) -> None:
        self._nodes.pop(job, None)

    def kill_node(self, node: str) -> None:
        """End a node of every allocation, as a power failure does."""
        for nodes in self._nodes.values():
            nodes[node] = False

    def allocations(self) -> int:
        """Return how many allocations there ever were."""
        return len(self._jobs)
