"""Finds the address by which the other nodes of a cluster reach this machine."""

import re
import socket
from collections.abc import Callable, Iterable

from orchestrator.config import RunConfig
from orchestrator.config_sections import AUTO, is_reachable
from orchestrator.errors import PreconditionError
from orchestrator.launch.slurm_commands import SlurmError, ask

CONTROLLER = re.compile(r"^SlurmctldHost\[\d+\]\s*=\s*(\S+?)(?:\((\S+)\))?$", re.MULTILINE)
ANY_PORT = 9  # nothing is sent


def with_address(config: RunConfig) -> RunConfig:
    """Return the configuration with this machine's address in place of "auto".

    Raises:
        PreconditionError: None was found that other nodes reach.
    """
    if config.server.host != AUTO:
        return config
    server = config.server.model_copy(update={"host": own_address()})
    return config.model_copy(update={"server": server})


def own_address(ask_slurm: Callable[[list[str]], bytes] = ask) -> str:
    """Return this machine's address on the way to Slurm's controller, or that of its name.

    In this order: every node reaches the controller, while a login node's name is often that of a
    network which the nodes are not on.

    Raises:
        PreconditionError: Both lead nowhere but to this machine itself.
    """
    why = ""
    try:
        hosts = controllers(ask_slurm(["scontrol", "show", "config"]))
    except SlurmError as error:
        hosts, why = (), f" ({error})"
    name = socket.gethostname()
    for address in (*_towards(hosts), *_addresses_of(name)):
        if is_reachable(address):
            return address
    raise PreconditionError(
        f'server.host: "auto" finds no address of {name} but loopback{why}; give one of this '
        "machine that Slurm's nodes can connect to"
    )


def controllers(shown: bytes) -> tuple[str, ...]:
    """Return the controllers' addresses, or names, in `scontrol show config`."""
    found = CONTROLLER.findall(shown.decode(errors="replace"))
    return tuple(address or name for name, address in found)


def _towards(hosts: Iterable[str]) -> Iterable[str]:
    """Yield this machine's end of the route to each host; nothing is sent."""
    for host in hosts:
        for family, kind, protocol, address in _look_up(host):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    yield str(probe.getsockname()[0])
            except OSError:  # no route
                continue


def _addresses_of(name: str) -> Iterable[str]:
    for _, _, _, address in _look_up(name):
        yield str(address[0])


def _look_up(host: str) -> "list[tuple[int, int, int, tuple[str, int]]]":
    try:
        found = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    # A link-local address means something only together with an interface.
    return [
        (family, kind, protocol, (str(address[0]), ANY_PORT))
        for family, kind, protocol, _, address in found
        if "%" not in str(address[0])
    ]
