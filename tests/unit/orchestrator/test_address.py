import socket

import pytest

from orchestrator import address
from orchestrator.address import controllers, own_address, with_address
from orchestrator.config import parse
from orchestrator.errors import PreconditionError
from orchestrator.launch.slurm_commands import SlurmUnavailable

RAW = {"run": {"name": "r"}, "job": {"command": ["true"]}}
SHOWN = b"""\
Configuration data as of 2026-11-30T18:00:00
SlurmctldDebug          = info
SlurmctldHost[0]        = ctl1(10.1.0.1)
SlurmctldHost[1]        = ctl2
SlurmctldPort           = 6817
"""


class Network:
    """Names, and this machine's end of the route to an address."""

    def __init__(self, names: dict[str, list[str]], routes: dict[str, str]) -> None:
        self.names, self.routes = names, routes

    def look_up(self, host: str) -> list[str]:
        return self.names.get(host, [host] if host[:1].isdigit() else [])

    def towards(self, target: str) -> str | None:
        return self.routes.get(target)


def find(monkeypatch: pytest.MonkeyPatch, network: Network, shown: bytes = SHOWN) -> str:
    monkeypatch.setattr(socket, "gethostname", lambda: "login1")
    monkeypatch.setattr(address, "look_up", network.look_up)
    monkeypatch.setattr(address, "route_to", network.towards)
    return own_address(lambda _: shown)


def test_the_controllers_are_read_with_their_addresses() -> None:
    assert controllers(SHOWN) == ("10.1.0.1", "ctl2")
    assert controllers(b"") == ()
    assert controllers(b"SlurmctldHost[0] = a\n") == ("a",)


def test_the_network_of_the_controller_comes_before_that_of_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network({"login1": ["192.0.2.7"]}, {"10.1.0.1": "10.1.0.7"})
    assert find(monkeypatch, network) == "10.1.0.7"


def test_the_second_controller_and_then_the_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"login1": ["127.0.1.1", "192.0.2.7"], "ctl2": ["10.2.0.1"]}
    assert find(monkeypatch, Network(names, {"10.2.0.1": "10.2.0.7"})) == "10.2.0.7"
    assert find(monkeypatch, Network(names, {})) == "192.0.2.7"
    assert find(monkeypatch, Network(names, {"10.1.0.1": "127.0.0.1"})) == "192.0.2.7"


def test_what_only_means_something_on_one_link_is_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"login1": ["fe80::1", "2001:db8::7"]}
    assert find(monkeypatch, Network(names, {}), b"") == "2001:db8::7"


def test_a_machine_that_nobody_reaches_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network({"login1": ["127.0.1.1"]}, {})
    with pytest.raises(PreconditionError, match=r'^server\.host: "auto" finds .* login1') as caught:
        find(monkeypatch, network)
    assert "\n" not in str(caught.value)


def test_a_controller_that_does_not_answer_is_named_when_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(_: list[str]) -> bytes:
        raise SlurmUnavailable("scontrol: timed out")

    monkeypatch.setattr(address, "look_up", lambda _: ["192.0.2.7"])
    assert own_address(silent) == "192.0.2.7"
    monkeypatch.setattr(address, "look_up", lambda _: [])
    with pytest.raises(PreconditionError, match=r"\(scontrol: timed out\)"):
        own_address(silent)


def test_the_end_of_a_real_route_is_an_address_of_this_machine() -> None:
    assert address.route_to("127.0.0.1") == "127.0.0.1"
    assert address.look_up("127.0.0.1") == ["127.0.0.1"]
    assert address.look_up("no-such-host.invalid") == []
    assert address.route_to("no address") is None


def test_only_auto_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "own_address", lambda: "10.0.0.9")
    local = parse(RAW, "r")
    assert with_address(local) is local
    slurm = parse({**RAW, "nodes": {"launcher": "slurm"}}, "r")
    assert with_address(slurm).server.host == "10.0.0.9"
    assert slurm.server.host == "auto"
