"""Names, addresses, ports and paths of a cluster: pure values, all derived from few."""

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from deploy.devcluster.errors import NotFound, UsageError

ROOT = Path("/run/devcluster")
HEAD = "head"
SWITCH = "switch"
MAX_CLUSTERS = 64
MAX_NODES = 200
FIRST_HOST = 11
FIRST_PORT = 27000
PORTS_PER_CLUSTER = 10
NAME = re.compile(r"[a-z][a-z0-9]{0,10}")
SIZE = re.compile(r"[1-9][0-9]*[kmg]?", re.IGNORECASE)
SETTING = re.compile(r"([A-Za-z]+)=(.*)")
PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - the folders that each node has for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What was asked for.

    Attributes:
        cpus: CPUs that each node claims to have, whatever the machine has.
        memory_mb: Memory that each node claims to have.
        shm_size: Size of each node's own /dev/shm, as mount(8) writes it: 512m, 2g.
        tmp_size: Size of each node's own /tmp.
        grace_s: Time between the signal and the kill of a preempted job.
        share: Folders below /tmp or /dev/shm that the nodes see as the machine does.
        settings: Lines KEY=VALUE that replace or extend those of slurm.conf.
    """

    name: str = "dev"
    nodes: int = 4
    gpus: int = 8
    cpus: int = 8
    memory_mb: int = 16384
    prefix: str = "node"
    shm_size: str = "1g"
    tmp_size: str = "1g"
    grace_s: int = 10
    accounting: bool = False
    share: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name("--name", self.name)
        _check_name("--prefix", self.prefix)
        for option, value, least, most in (
            ("--nodes", self.nodes, 1, MAX_NODES),
            ("--gpus", self.gpus, 0, 64),
            ("--cpus", self.cpus, 1, 1024),
            ("--memory-mb", self.memory_mb, 1, 2**31),
            ("--grace", self.grace_s, 0, 3600),
        ):
            if not least <= value <= most:
                raise UsageError(f"{option} {value}: must be from {least} to {most}")
        for option, size in (("--shm-size", self.shm_size), ("--tmp-size", self.tmp_size)):
            if not SIZE.fullmatch(size):
                raise UsageError(f"{option} {size!r}: write a size such as 512m or 2g")
        for path in self.share:
            if not any(Path(path).is_relative_to(private) for private in PRIVATE):
                raise UsageError(f"--share {path}: only for folders below {' or '.join(PRIVATE)}")
        for setting in self.settings:
            if not SETTING.fullmatch(setting):
                raise UsageError(f"--set {setting!r}: write KEY=VALUE as in slurm.conf")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the state file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Spec":
        """Read what `to_json` gave."""
        known = {each.name for each in fields(cls)}
        plain = {key: value for key, value in values.items() if key in known}
        plain |= {key: tuple(values.get(key, ())) for key in ("share", "settings")}
        return cls(**plain)


def _check_name(option: str, name: str) -> None:
    if not NAME.fullmatch(name) or name in (HEAD, SWITCH):
        raise UsageError(
            f"{option} {name!r}: a letter, then letters and digits, at most 11, all lower case"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: `mac` stays the same over power cycles, as that of a real card does."""

    name: str
    address: str
    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where everything of a cluster is; clusters of different index never meet.

    Attributes:
        index: Chooses subnet and ports, from 0 to `MAX_CLUSTERS` - 1.
        machine: Host name of the machine; the nodes find it at the head's address.
    """

    spec: Spec
    index: int
    machine: str = "localhost"
    root: Path = field(default=ROOT)

    @property
    def state(self) -> Path:
        """The folder of everything that this cluster writes."""
        return self.root / self.spec.name

    @property
    def subnet(self) -> str:
        """The nodes' network, as 10.77.0.0/24."""
        return f"10.77.{self.index}.0/24"

    @property
    def head_address(self) -> str:
        """The machine's address in that network."""
        return f"10.77.{self.index}.1"

    @property
    def link(self) -> str:
        """Name of the machine's network device in that network; Linux allows 15 letters."""
        return f"dc-{self.spec.name}"

    @property
    def slurmctld_port(self) -> int:
        """TCP port of slurmctld on the machine."""
        return FIRST_PORT + PORTS_PER_CLUSTER * self.index

    @property
    def slurmd_port(self) -> int:
        """TCP port of slurmd on every node."""
        return self.slurmctld_port + 1

    @property
    def slurmdbd_port(self) -> int:
        """TCP port of slurmdbd on the machine."""
        return self.slurmctld_port + 2

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, counted from 1."""
        return tuple(
            Node(
                name=f"{self.spec.prefix}{number}",
                address=f"10.77.{self.index}.{FIRST_HOST + number - 1}",
                mac=f"02:dc:00:{self.index:02x}:00:{number:02x}",
            )
            for number in range(1, self.spec.nodes + 1)
        )

    def node(self, name: str) -> Node:
        """Return a node by its name.

        Raises:
            NotFound: There is none; names those there are.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        first, last = self.nodes[0].name, self.nodes[-1].name
        raise NotFound(f"no node {name} in cluster {self.spec.name}; it has {first} to {last}")

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.state / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """Socket of this cluster's own munged."""
        return self.state / "munge.socket"

    @property
    def devices(self) -> Path:
        """Folder of the GPU devices; a file system of its own on each node."""
        return self.state / "dev"

    def log(self, unit: str) -> Path:
        """What a daemon logged."""
        return self.state / "log" / f"{unit}.log"

    def console(self, unit: str) -> Path:
        """What a daemon or node printed, from before it could log on."""
        return console(self.state, unit)

    def spool(self, node: str) -> Path:
        """A node's slurmd spool: the part of its disk that outlives a power loss."""
        return self.state / "spool" / node


def console(state: Path, unit: str) -> Path:
    """Return the file that takes stdout and stderr of a unit."""
    return state / "log" / f"{unit}.out"
