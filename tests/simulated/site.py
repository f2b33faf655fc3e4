"""The jobs of a run and the nodes that they get: what Slurm is to a supervisor."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.actions import Action, GiveBack, Launch, NoteNode, Unhold
from orchestrator.core.events import Ending

if TYPE_CHECKING:
    from tests.simulated.world import World

LEFT_S = 25.0
HELD = "launch failed requeued held"


@dataclass
class Job:
    """One allocation as Slurm has it: `queued`, `held`, `running` or `gone`.

    Attributes:
        had_nodes: It was given nodes, so that ending it ends something.
        given_back: The run ended it.
    """

    number: str
    nodes: int
    exclude: tuple[str, ...]
    state: str = "queued"
    ending: Ending | None = None
    members: tuple[str, ...] = ()
    had_nodes: bool = False
    given_back: bool = False


@dataclass
class Site:
    """All jobs of the run, the nodes that there are, and what the ledger says of them.

    Attributes:
        leave_at: When agents that got SIGTERM leave, whatever becomes of their job.
        spoken: What persons and other runs exclude.
        noted: What this run excludes.
    """

    names: tuple[str, ...]
    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    leave_at: dict[str, float] = field(default_factory=dict)
    spoken: dict[str, str] = field(default_factory=dict)
    noted: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)

    # What the supervisor asks for.

    def does(self, key: str, action: Action, refuses: bool) -> tuple[bool, str]:
        """Carry out an action; the same request again finds what it made the first time."""
        match action:
            case Launch():
                return self._submits(key, action, refuses)
            case Unhold(job=number, exclude=exclude):
                job = self.jobs[number]
                if job.state == "held" and not refuses:
                    job.state, job.exclude = "queued", exclude
                return not refuses, number
            case GiveBack(job=number):
                self.jobs[number].given_back = True
                self.ends(self.jobs[number], Ending.CANCELLED)
                return True, number
            case NoteNode(node=node, excluded_s=excluded_s):
                if excluded_s and not refuses:
                    self.noted[node] = "this run"
                return not refuses, ""
        raise AssertionError(action)

    def _submits(self, key: str, action: Launch, refuses: bool) -> tuple[bool, str]:
        if refuses and key not in self.keys:
            return False, "no such partition"
        if key not in self.keys:
            number = self.keys[key] = f"job-{len(self.jobs) + 1}"
            self.jobs[number] = Job(number, action.nodes, action.exclude)
        return True, self.keys[key]

    # What happens to jobs.

    def living(self, *states: str) -> list[Job]:
        return [
            j for j in self.jobs.values() if j.state in (states or ("queued", "held", "running"))
        ]

    def job_of(self, node: str) -> str:
        return next((j.number for j in self.living("running") if node in j.members), "")

    def prepares(self, node: str) -> str:
        """An agent is about to start on a node: nobody told this one to leave."""
        self.leave_at.pop(node, None)
        return self.job_of(node)

    def gives_nodes(self, job: Job) -> tuple[str, ...]:
        """A queued job gets nodes that no other has, if there are enough; they are still empty."""
        taken = {name for other in self.living("running") for name in other.members}
        free = [n for n in self.names if n not in taken and n not in job.exclude]
        free = [n for n in free if n not in self.leaving]
        if len(free) < job.nodes:
            return ()
        job.state, job.members, job.had_nodes = "running", tuple(free[: job.nodes]), True
        return job.members

    def ends(self, job: Job, ending: Ending) -> None:
        if job.state != "gone":
            job.state, job.ending = "gone", ending

    def is_left(self, world: "World") -> None:
        """The run is over: all its jobs are cancelled."""
        for job in self.living():
            job.given_back = True
            self.ends(job, Ending.CANCELLED)
        self.kills_agents(world)

    def goes_well(self, world: "World") -> None:
        """Every job in the queue gets its nodes, and every node an agent."""
        for job in self.living("queued"):
            self.gives_nodes(job)
        for job in self.living("running"):
            for name in job.members:
                if name not in world.agents:
                    world.boots(name)

    def loses_nodes(self, world: "World", *names: str) -> None:
        """Nodes fail; their jobs go on without them."""
        for job in self.living("running"):
            job.members = tuple(n for n in job.members if n not in names)
        self.names = tuple(n for n in self.names if n not in names)
        for name in names:
            world.agents.pop(name, None)

    # What is seen of it.

    def is_noticed(self, world: "World") -> None:
        """Agents of jobs that ended are gone, and a look at each job tells what is new."""
        self.kills_agents(world)
        for name, at in tuple(self.leave_at.items()):
            if at <= world.now and name in world.agents:
                world.agents.pop(name)
        self.leave_at = {n: at for n, at in self.leave_at.items() if at > world.now}
        for node in tuple(world.state.nodes.values()):
            if node.alive and node.name not in world.agents:
                world.hears(
                    ev.AgentLost(
                        node=node.name,
                        incarnation=node.incarnation,
                        why="its agent's process is gone",
                        silent_s=1.0,
                    )
                )
        for job in tuple(self.jobs.values()):
            self.is_looked_at(world, job)

    def kills_agents(self, world: "World") -> None:
        """Agents die with their jobs; what they had not said is lost, but for what is late."""
        for name, agent in tuple(world.agents.items()):
            if agent.job and self.jobs[agent.job].state == "gone":
                world.late += agent.outbox[:3]
                world.agents.pop(name)

    def is_looked_at(self, world: "World", job: Job, ending: Ending | None = None) -> None:
        known = next((a for a in world.state.allocations if a.job == job.number), None)
        if known is None:
            return
        ending = ending or job.ending
        why = {"queued": "Priority", "held": HELD}.get(job.state, "")
        if known.is_over and ending in (None, Ending.UNKNOWN, known.ending):
            return
        if (known.phase.value, known.why, known.ending) != (job.state, why, ending):
            world.hears(ev.JobObserved(job=job.number, state=job.state, why=why, ending=ending))

    def reads_ledger(self, world: "World") -> None:
        excluded = {**self.noted, **self.spoken}
        if (excluded, len(self.noted)) != (world.state.ledger, world.state.excluded_lately):
            world.hears(ev.LedgerRead(excluded=excluded, excluded_lately=len(self.noted)))

    def wants_back(self, world: "World", name: str, why: str) -> None:
        """The site drains a node, or resumes it."""
        self.leaving = {n: w for n, w in self.leaving.items() if n != name} | (
            {name: why} if why else {}
        )
        if name in world.state.nodes:
            world.hears(ev.NodeLeaving(node=name, why=why))

    def warns(self, world: "World", job: Job, signal: str, which: Callable[[str], bool]) -> None:
        for name in job.members:
            if name in world.agents and which(name):
                world.agents[name].fact(ev.AgentWarned(node=name, signal=signal, left_s=LEFT_S))
                if signal == "TERM":
                    self.leave_at[name] = world.now + LEFT_S
