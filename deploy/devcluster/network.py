"""The cluster's network: a bridge in a namespace of its own, one cable to every node and one here.

The bridge is not on the machine itself: there, packet filters of containers or firewalls would
drop what nodes say to each other. The machine sees one device, the nodes have one each (eth0).
All devices of a namespace go with its last process, so a node's power loss unplugs it at once,
and no late packet of a dead node (a FIN, a RST) reaches the others.
"""

import json
from typing import Any

from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import HEAD, Node, Plan
from deploy.devcluster.programs import run, succeeds

BRIDGE = "br0"
DEVICE = "eth0"
PREFIX_LENGTH = 24


def inside(pid: int, *argv: str) -> list[str]:
    """Return the command that runs another in the network namespace of a process."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv]


def _batch(pid: int | None, *lines: str) -> None:
    argv = ["ip", "-batch", "-"]
    run(argv if pid is None else inside(pid, *argv), stdin="\n".join([*lines, ""]))


def build(plan: Plan, switch: int) -> None:
    """Make the bridge in the switch's namespace and plug the machine in.

    Args:
        plan: Names and addresses.
        switch: Pid of the process that holds the switch's namespace.
    """
    _batch(
        switch,
        "link set lo up",
        f"link add name {BRIDGE} type bridge",
        f"link set {BRIDGE} up",
    )
    _batch(
        None,
        f"link add name {plan.link} type veth peer name {HEAD} netns {switch}",
        f"addr add {plan.head_address}/{PREFIX_LENGTH} dev {plan.link}",
        f"link set {plan.link} up",
    )
    _batch(switch, f"link set {HEAD} master {BRIDGE}", f"link set {HEAD} up")


def plug(plan: Plan, node: Node, switch: int, init: int) -> None:
    """Give a node its device and address; a cable that is left over is replaced.

    Args:
        plan: Names and addresses.
        node: The node.
        switch: Pid of the switch's process.
        init: Pid of the node's first process, as the machine sees it.
    """
    unplug(node, switch)
    _batch(
        None,
        f"link add name {node.name} netns {switch} type veth "
        f"peer name {DEVICE} address {node.mac} netns {init}",
    )
    _batch(switch, f"link set {node.name} master {BRIDGE}", f"link set {node.name} up")
    _batch(
        init,
        "link set lo up",
        f"addr add {node.address}/{PREFIX_LENGTH} dev {DEVICE}",
        f"link set {DEVICE} up",
        f"route add default via {plan.head_address}",
    )


def unplug(node: Node, switch: int) -> None:
    """Take a node's cable away; one that is gone is no error."""
    succeeds(inside(switch, "ip", "link", "del", node.name))


def set_link(node: Node, switch: int, *, up: bool) -> None:
    """Cut a node's cable at the switch, or mend it."""
    run(inside(switch, "ip", "link", "set", node.name, "up" if up else "down"))


def links(switch: int) -> dict[str, bool]:
    """Return the ports of the switch and whether each is switched on."""
    shown: list[dict[str, Any]] = json.loads(run(inside(switch, "ip", "-json", "link", "show")))
    return {link["ifname"]: "UP" in link["flags"] for link in shown}


def remove(plan: Plan) -> None:
    """Remove the machine's device, and the address with it.

    Raises:
        DevclusterError: It is still there afterwards.
    """
    if not succeeds(["ip", "link", "show", plan.link]):
        return
    if not succeeds(["ip", "link", "del", plan.link]) and succeeds(
        ["ip", "link", "show", plan.link]
    ):
        raise DevclusterError(f"the network device {plan.link} cannot be removed")
