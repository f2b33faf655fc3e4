"""What this kernel can do: tried out in throw-away namespaces, so nothing is changed.

Small kernels (virtual machines, containers) lack queueing disciplines, nftables or the CPU cgroup.
The cluster comes up all the same; the faults that need them refuse with one line.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deploy.devcluster import cgroup
from deploy.devcluster.errors import PreconditionError
from deploy.devcluster.programs import succeeds

IN_NETWORK = ("unshare", "--net", "--")
BRIDGE_RULE = (
    'table bridge t { chain c { type filter hook forward priority 0; iifname "a" '
    "meta l4proto { tcp, udp } th dport 1 numgen random mod 100 < 50 drop; }; }"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One thing that a kernel may lack.

    Attributes:
        needed_by: The commands that refuse without it; "up" means no cluster at all; empty: none,
            it is looked at for people with ideas of their own.
    """

    name: str
    needed_by: str
    works: bool


def _qdisc(*words: str) -> bool:
    return succeeds([*IN_NETWORK, "tc", "qdisc", "add", "dev", "lo", "root", *words])


def _namespaces() -> bool:
    flags = ("--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc")
    return succeeds(["unshare", *flags, "mount", "-t", "tmpfs", "none", "/mnt"])


def _veth_on_bridge() -> bool:
    lines = "link add name b1 type bridge\nlink add name v1 type veth peer name v2\n"
    lines += "link set v1 master b1\n"
    return succeeds([*IN_NETWORK, "ip", "-batch", "-"], stdin=lines)


PROBES: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    ("namespaces and tmpfs", "up", _namespaces),
    ("veth and bridge", "up", _veth_on_bridge),
    ("tbf", "slow", lambda: _qdisc("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "50ms")),
    ("netem", "slow --delay", lambda: _qdisc("netem", "delay", "1ms")),
    ("prio", "", lambda: _qdisc("prio")),
    ("nft", "drop", lambda: succeeds([*IN_NETWORK, "nft", "-f", "-"], stdin=BRIDGE_RULE)),
    ("cpu cgroup", "throttle", lambda: cgroup.controller() is not None),
)


def probe() -> tuple[Feature, ...]:
    """Try every feature; needs root, takes about a tenth of a second."""
    with ThreadPoolExecutor(len(PROBES)) as pool:
        works = tuple(pool.map(lambda one: one[2](), PROBES))
    return tuple(
        Feature(name=name, needed_by=needed_by, works=worked)
        for (name, needed_by, _), worked in zip(PROBES, works, strict=True)
    )


def lacking(features: tuple[Feature, ...]) -> str | None:
    """Return one line that names what is missing and what does not work without it, or None.

    Raises:
        PreconditionError: Something that every cluster needs is missing.
    """
    missing = [feature for feature in features if feature.needed_by and not feature.works]
    vital = [feature.name for feature in missing if feature.needed_by == "up"]
    if vital:
        raise PreconditionError(
            f"this kernel or container gives no {', '.join(vital)}; no cluster is possible here "
            "(a container needs --privileged)"
        )
    if not missing:
        return None
    words = (f"{feature.name} ({feature.needed_by})" for feature in missing)
    return f"this kernel lacks: {', '.join(words)}"
