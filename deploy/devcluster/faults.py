"""What can go wrong on a cluster, done for real: power, cables, packets, CPUs, Slurm itself."""

import signal
from contextlib import suppress

from deploy.devcluster import cgroup, daemons, network, render, traffic
from deploy.devcluster.errors import DevclusterError, PreconditionError, UsageError
from deploy.devcluster.plan import Node, Plan
from deploy.devcluster.processes import is_alive, kill, wait_until
from deploy.devcluster.units import Units

POWER_TIMEOUT_S = 20.0


def power_off(plan: Plan, units: Units, node: Node) -> bool:
    """Cut a node's power: silence on the network, then no process and no memory of it.

    The cable goes first: a dying process must not close its connections as if it had been told to.
    Returns False when it was off already.
    """
    init = daemons.init_pid(units, node.name)
    outer = units.pid(node.name)
    network.unplug(node, daemons.switch_pid(units))
    if outer is None:
        return False
    if init is not None:
        kill(init)
        # The kernel ends the first process of a namespace only after all the others.
        wait_until(f"{node.name} is dead", lambda: not is_alive(init), POWER_TIMEOUT_S)
    units.stop(node.name, signal.SIGKILL)
    heal(plan, units, node)
    return True


def power_on(plan: Plan, units: Units, node: Node) -> bool:
    """Switch a node on; Slurm takes it back by itself. Returns False when it was on already."""
    if units.pid(node.name) is not None:
        return False
    daemons.start_nodes(plan, units, [node])
    return True


def partition(units: Units, node: Node) -> None:
    """Cut a node's cable: it lives on and reaches nobody."""
    _powered(units, node)
    network.set_link(node, daemons.switch_pid(units), up=False)


def heal(plan: Plan, units: Units, node: Node) -> None:
    """Undo every fault of a node's network and CPUs; one that is off stays off."""
    switch = daemons.switch_pid(units)
    init = daemons.init_pid(units, node.name)
    traffic.clear(node, switch, init)
    with suppress(PreconditionError):
        cgroup.throttle(plan, node.name, None)
    if init is not None:
        network.set_link(node, switch, up=True)


def slow(units: Units, node: Node, rate: str, delay: str | None) -> None:
    """Limit a node's cable in both directions; see `traffic.slow`."""
    traffic.slow(node, daemons.switch_pid(units), _powered(units, node), rate, delay)


def drop(units: Units, node: Node, port: int | None, percent: int) -> None:
    """Drop packets of a node in both directions; see `traffic.drop`."""
    _powered(units, node)
    traffic.drop(node, daemons.switch_pid(units), port, percent)


def throttle(plan: Plan, units: Units, node: Node, cpus: float) -> None:
    """Let all processes of a node together have so many CPUs of the machine, 0.01 or more."""
    _powered(units, node)
    if not 0.01 <= cpus <= 1024:
        raise UsageError(f"--cpu {cpus:g}: must be from 0.01 to 1024 CPUs")
    cgroup.throttle(plan, node.name, cpus)


def stop_slurmctld(units: Units, *, hard: bool) -> None:
    """Stop slurmctld as an operator does, or kill it before it can save anything."""
    units.stop("slurmctld", signal.SIGKILL if hard else signal.SIGTERM)


def start_slurmctld(plan: Plan, units: Units) -> None:
    """Start slurmctld again and wait until it answers."""
    daemons.start_slurmctld(plan, units)


def drain(plan: Plan, node: Node, reason: str) -> None:
    """Let a node's jobs finish and take no new ones."""
    words = (f"NodeName={node.name}", "State=DRAIN", f"Reason={reason}")
    daemons.client(plan, "scontrol", "update", *words)


def undrain(plan: Plan, node: Node) -> None:
    """Take a drained or down node back into service."""
    state = daemons.node_states(plan).get(node.name, "")
    if state.startswith(("drain", "down", "fail")):
        daemons.client(plan, "scontrol", "update", f"NodeName={node.name}", "State=RESUME")


def preempt(plan: Plan, job: str, hold_s: int) -> str:
    """Have Slurm preempt a job: a job of the urgent partition asks for exactly its nodes.

    Slurm signals the job, waits for the grace of its partition, ends it, and requeues it unless it
    was submitted with --no-requeue. Comes back at once, with the id of the urgent job.

    Args:
        plan: The cluster.
        job: Id of a running job in the batch partition.
        hold_s: How long the urgent job then keeps the nodes.
    """
    if not job.isdecimal():
        raise UsageError(f"{job!r} is no job id")
    shown = daemons.client(plan, "squeue", "-h", "-j", job, "-o", "%T %P %D %N").split()
    if len(shown) != 4 or shown[0] != "RUNNING" or shown[1] == render.URGENT:
        state = " ".join(shown[:2]) or "not in the queue"
        raise DevclusterError(f"job {job} is {state}; only a running {render.BATCH} job can be")
    argv = ["sbatch", "--parsable", "-p", render.URGENT, "-N", shown[2], "-w", shown[3]]
    argv += ["--exclusive", "-J", f"preempts-{job}", "-D", "/", "-o", "/dev/null"]
    return daemons.client(plan, *argv, "--wrap", f"exec sleep {hold_s}").strip()


def _powered(units: Units, node: Node) -> int:
    init = daemons.init_pid(units, node.name)
    if init is None:
        raise DevclusterError(f"{node.name} is off; first: devcluster power-on {node.name}")
    return init
