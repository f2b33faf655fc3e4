"""What a cluster looks like now: read back from the processes, the network and Slurm."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deploy.devcluster import cgroup, daemons, lifecycle, network, traffic
from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import Plan
from deploy.devcluster.units import Units

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node as it is.

    Attributes:
        link: "up", "cut" (partitioned), or "none" when the node is off.
        slurm: Slurm's word, "unknown" when slurmctld does not answer.
        pid: The node's first process as the machine sees it.
    """

    name: str
    address: str
    power: bool
    link: str
    slurm: str
    slow: str | None
    drop: str | None
    cpus: float | None
    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The whole cluster; `daemons` tells of each whether it runs."""

    name: str
    state: str
    slurm_conf: str
    address: str
    daemons: dict[str, bool]
    nodes: tuple[NodeStatus, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def look(plan: Plan) -> Status:
    """Look at a cluster; what cannot be found out without root is left out, not guessed."""
    units = Units(plan.state)
    up = lifecycle.is_up(plan)
    running = units.all() if up else {}
    names = {node.name for node in plan.nodes}
    return Status(
        name=plan.spec.name,
        state="up" if up else "starting, or broken: devcluster down removes it",
        slurm_conf=str(plan.slurm_conf),
        address=plan.head_address,
        daemons={name: unit.pid is not None for name, unit in running.items() if name not in names},
        nodes=_nodes(plan, units) if up else (),
    )


def _nodes(plan: Plan, units: Units) -> tuple[NodeStatus, ...]:
    switch = daemons.switch_pid(units)
    links, slow, drop = network.links(switch), traffic.slowed(switch), traffic.dropping(switch)
    slurm: dict[str, str] = {}
    with suppress(DevclusterError):
        if daemons.answers(plan):
            slurm = daemons.node_states(plan)
    found = []
    for node in plan.nodes:
        pid = daemons.init_pid(units, node.name)
        link = {True: "up", False: "cut", None: "none"}[links.get(node.name)]
        found.append(
            NodeStatus(
                name=node.name,
                address=node.address,
                power=pid is not None,
                link=link,
                slurm=slurm.get(node.name, UNKNOWN),
                slow=slow.get(node.name),
                drop=drop.get(node.name),
                cpus=cgroup.limit(plan, node.name),
                pid=pid,
            )
        )
    return tuple(found)


def table(status: Status) -> str:
    """Return the status as text for a person."""
    stopped = [name for name, runs in status.daemons.items() if not runs]
    lines = [f"cluster {status.name}: {status.state}, machine is {status.address} to the nodes"]
    lines += [f"stopped: {', '.join(stopped)}"] if stopped else []
    if not status.nodes:
        return "\n".join([*lines, ""])
    rows = [("NODE", "ADDRESS", "POWER", "LINK", "SLURM", "FAULTS")]
    for node in status.nodes:
        wrong = [f"slow {node.slow}"] if node.slow else []
        wrong += [f"drop {node.drop}"] if node.drop else []
        wrong += [f"throttle {node.cpus:g} CPU"] if node.cpus is not None else []
        power = "on" if node.power else "off"
        rows.append(
            (node.name, node.address, power, node.link, node.slurm, "; ".join(wrong) or "-")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, ""])
