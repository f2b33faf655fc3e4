"""Gets a person or a test onto a node, onto the head, or into the switch's network."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deploy.devcluster import cgroup, daemons, head_init, network
from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import HEAD, SWITCH, Plan
from deploy.devcluster.programs import become
from deploy.devcluster.units import Units


def variables(plan: Plan) -> dict[str, str]:
    """Return what a client of the cluster on this machine needs in its environment.

    DEVCLUSTER_ADDRESS is where the nodes reach services of the machine.
    """
    return {
        "SLURM_CONF": str(plan.slurm_conf),
        "DEVCLUSTER_NAME": plan.spec.name,
        "DEVCLUSTER_ADDRESS": plan.head_address,
    }


def enter(plan: Plan, place: str, command: Sequence[str]) -> NoReturn:
    """Become a command at a place; its exit code is that of this process.

    Args:
        plan: The cluster.
        place: A node's name, `head` (the machine with the cluster's names) or `switch` (the
            machine with the switch's network devices, for tcpdump).
        command: The program and its arguments; empty for a shell.
    """
    units = Units(plan.state)
    argv = list(command) or [os.environ.get("SHELL", "/bin/sh")]
    env = os.environ | variables(plan)
    if place == HEAD:
        argv = head_init.command(plan.state, *argv)
    elif place == SWITCH:
        argv = network.inside(daemons.switch_pid(units), *argv)
    else:
        argv = _on_node(plan, units, place, argv)
    become(argv, env)


def _on_node(plan: Plan, units: Units, name: str, argv: list[str]) -> list[str]:
    node = plan.node(name)
    init = daemons.init_pid(units, node.name)
    if init is None:
        raise DevclusterError(f"{name} is off; first: devcluster power-on {name}")
    group = cgroup.group(plan, name)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    # The node has a /tmp of its own, so this folder may not be there.
    here = Path.cwd()
    there = here if Path(f"/proc/{init}/root{here}").is_dir() else Path("/")
    namespaces = ("--net", "--uts", "--ipc", "--pid", "--mount")
    return ["nsenter", "--target", str(init), *namespaces, "--", "env", "-C", str(there), *argv]
