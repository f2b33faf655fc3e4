"""Finds the address by which the other nodes of a cluster reach this machine."""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterator

from orchestrator.config import RunConfig
from orchestrator.config_sections import AUTO
from orchestrator.errors import PreconditionError
from orchestrator.launch.slurm_commands import SlurmError, ask

CONTROLLER = re.compile(r"^SlurmctldHost\[\d+\]\s*=\s*(\S+?)(?:\((\S+)\))?$", re.MULTILINE)
ANY_PORT = 9


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
    why, name = "", socket.gethostname()
    try:
        hosts = controllers(ask_slurm(["scontrol", "show", "config"]))
    except SlurmError as error:
        hosts, why = (), f" ({error})"
    for address in _candidates(hosts, name):
        if _is_of_use(address):
            return address
    raise PreconditionError(
        f'server.host: "auto" finds no address of {name} but loopback{why}; give one of this '
        "machine that Slurm's nodes can connect to"
    )


def controllers(shown: bytes) -> tuple[str, ...]:
    """Return the controllers' addresses, or names, in `scontrol show config`."""
    found = CONTROLLER.findall(shown.decode(errors="replace"))
    return tuple(address or name for name, address in found)


def look_up(host: str) -> list[str]:
    """Return the addresses of a host, none when it has none."""
    try:
        found = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def route_to(address: str) -> str | None:
    """Return this machine's address on the way to another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _candidates(hosts: tuple[str, ...], name: str) -> Iterator[str]:
    for host in hosts:
        for address in look_up(host):
            if (here := route_to(address)) is not None:
                yield here
    yield from look_up(name)


def _is_of_use(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_unspecified or address.is_link_local)
