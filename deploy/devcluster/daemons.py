"""Starts the daemons and nodes of a cluster, each as a unit of its warden."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deploy.devcluster import accounting, cgroup, head_init, network, render
from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import SWITCH, Node, Plan
from deploy.devcluster.processes import children, wait_until
from deploy.devcluster.programs import listens, run
from deploy.devcluster.units import Units, python

START_TIMEOUT_S = 20.0
MUNGE_KEY_BYTES = 128
CLIENT_TIMEOUT_S = 10.0
SLURMCTLD = "slurmctld"
ASK_S = 0.1
READY_STATES = ("idle", "mixed", "allocated")
NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child")


def write_files(plan: Plan) -> None:
    """Write everything that the daemons read."""
    state = plan.state
    for folder in (state / "slurmctld", state / "log", plan.devices):
        folder.mkdir(exist_ok=True)
    for node in plan.nodes:
        plan.spool(node.name).mkdir(parents=True, exist_ok=True)
    for name, text, mode in (
        ("slurm.conf", render.slurm_conf(plan), 0o644),
        ("gres.conf", render.gres_conf(plan), 0o644),
        ("cgroup.conf", render.cgroup_conf(slurm_version()), 0o644),
        ("slurmdbd.conf", render.slurmdbd_conf(plan), 0o600),
        ("hosts", render.hosts(plan), 0o644),
        ("resolv.conf", render.resolv_conf(), 0o644),
    ):
        if name == "slurmdbd.conf" and not plan.spec.accounting:
            continue
        (state / name).write_text(text, encoding="utf-8")
        (state / name).chmod(mode)
    key = state / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(MUNGE_KEY_BYTES))


def slurm_version() -> tuple[int, int]:
    """Return the version of the installed Slurm, as (22, 5)."""
    text = run(["slurmd", "-V"])
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise DevclusterError(f"slurmd -V says {text.strip()!r}, which is no version")
    return int(match[1]), int(match[2])


def start_all(plan: Plan, units: Units) -> None:
    """Start everything, in the order in which one needs the other; wait until Slurm is ready."""
    units.start(SWITCH, ["unshare", "--net", "--", "sleep", "infinity"])
    if plan.spec.accounting:
        accounting.start_database(plan, units)
    _start_munged(plan, units)
    network.build(plan, switch_pid(units))
    if plan.spec.accounting:
        accounting.start_daemon(plan, units)
    start_slurmctld(plan, units, wait=False)
    start_nodes(plan, units, plan.nodes)
    wait_ready(plan, units, plan.nodes)


def switch_pid(units: Units) -> int:
    """Return the pid whose network namespace is the switch.

    Raises:
        DevclusterError: It does not run: the cluster is broken.
    """
    pid = units.pid(SWITCH)
    if pid is None:
        raise DevclusterError("the cluster's switch is gone; run: devcluster down, then up")
    own = Path("/proc/self/ns/net").readlink()
    wait_until("the switch", lambda: Path(f"/proc/{pid}/ns/net").readlink() != own, START_TIMEOUT_S)
    return pid


def _start_munged(plan: Plan, units: Units) -> None:
    state = plan.state
    units.start(
        "munged",
        [
            *("munged", "--foreground", "--force", "--num-threads=2"),
            f"--socket={plan.munge_socket}",
            f"--key-file={state}/munge.key",
            f"--seed-file={state}/munge.seed",
            f"--pid-file={state}/munged.pid",
        ],
    )
    units.wait_ready("munged", plan.munge_socket.exists, START_TIMEOUT_S)


def start_slurmctld(plan: Plan, units: Units, *, wait: bool = True) -> None:
    """Start slurmctld; it goes on from its saved state.

    Args:
        plan: The cluster.
        units: Its processes.
        wait: Come back only when it answers.
    """
    argv = head_init.command(plan.state, "slurmctld", "-D", "-f", str(plan.slurm_conf))
    units.start(SLURMCTLD, argv)
    if wait:
        units.wait_ready(SLURMCTLD, lambda: answers(plan), START_TIMEOUT_S)


def start_nodes(plan: Plan, units: Units, nodes: Sequence[Node]) -> None:
    """Switch nodes on and plug them in; those that run are left alone."""
    running = units.all()
    off = [node for node in nodes if node.name not in running or running[node.name].pid is None]
    for node in off:
        argv = ["unshare", *NAMESPACES, "--mount-proc", "--", *python("node_init")]
        units.start(
            node.name,
            [*argv, str(plan.state), node.name],
            cgroup=cgroup.create(plan, node.name),
        )
    switch = switch_pid(units)
    for node in off:
        network.plug(plan, node, switch, _await_init(units, node.name))


def _await_init(units: Units, node: str) -> int:
    found: list[int] = []

    def inner() -> bool:
        pid = init_pid(units, node)
        found.extend([pid] if pid is not None else [])
        return bool(found)

    units.wait_ready(node, inner, START_TIMEOUT_S)
    return found[0]


def init_pid(units: Units, node: str) -> int | None:
    """Return the pid of a node's first process as the machine sees it; None when it is off."""
    outer = units.pid(node)
    inner = children(outer) if outer is not None else ()
    return inner[0] if inner else None


def client(plan: Plan, *argv: str, timeout_s: float = CLIENT_TIMEOUT_S) -> str:
    """Run a Slurm command of this cluster on the machine and return its stdout."""
    return run(argv, env={"SLURM_CONF": str(plan.slurm_conf)}, timeout_s=timeout_s)


def answers(plan: Plan) -> bool:
    """Whether slurmctld listens; asking it while it does not would take a client's patience."""
    return listens(plan.slurmctld_port)


def node_states(plan: Plan) -> dict[str, str]:
    """Return Slurm's word for each node, as sinfo says it: idle, mixed, down*, drained ...

    Raises:
        ProgramFailed: slurmctld does not answer.
    """
    lines = client(plan, "sinfo", "-h", "-N", "-p", render.BATCH, "-o", "%N %T").splitlines()
    return dict(line.split()[:2] for line in lines if line.strip())


def wait_ready(plan: Plan, units: Units, nodes: Sequence[Node]) -> None:
    """Wait until Slurm would run a job on these nodes.

    Raises:
        DevclusterError: It would not in time; names the nodes and the log to read.
    """
    units.wait_ready(SLURMCTLD, lambda: answers(plan), START_TIMEOUT_S)
    seen: dict[str, str] = {}

    def ready() -> bool:
        with suppress(DevclusterError):
            seen.update(node_states(plan))
        return all(seen.get(node.name) in READY_STATES for node in nodes)

    try:
        wait_until("Slurm is not ready", ready, START_TIMEOUT_S, poll_s=ASK_S)
    except DevclusterError as error:
        bad = (node.name for node in nodes if seen.get(node.name) not in READY_STATES)
        first = next(bad)
        logs = f"{plan.console(SLURMCTLD)}, {plan.console(first)}"
        words = f"{first} is {seen.get(first, 'unknown')}"
        raise DevclusterError(f"{error}: {words}; see {logs}") from error
