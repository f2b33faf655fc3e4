"""What Slurm says of nodes and reservations: who is gone, and who is to leave."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from orchestrator.launch import slurm_node_text as text

DATA = Path(__file__).parents[2] / "data" / "slurm"
NOW = datetime.fromisoformat("2025-09-01T09:45:00")


def data(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def node(state: str, reason: str = "", name: str = "n1") -> text.NodeView:
    return text.NodeView(name=name, state=state, reason=reason, since=None)


def test_a_lost_node_is_gone_in_scontrol_and_sinfo() -> None:
    nodes = text.scontrol_nodes(data("scontrol-nodes-node-lost-22.05"))
    assert [name for name, view in nodes.items() if text.is_gone(view.state)] == ["node1"]
    assert nodes["node1"].reason == "Not responding"
    states = text.sinfo_nodes(data("sinfo-node-lost-22.05"))
    assert [name for name, state in states.items() if text.is_gone(state)] == ["node1"]


def test_states_and_reasons_of_nodes_come_from_their_own_fields_only() -> None:
    nodes = text.scontrol_nodes(data("scontrol-nodes-24.11-handwritten"))
    assert {name: view.state for name, view in nodes.items()} == {
        "gpu-a001-b": "ALLOCATED+MAINTENANCE+RESERVED+REBOOT_REQUESTED",
        "gpu-a002-b": "IDLE+CLOUD+POWERED_DOWN",
        "gpu-a003-b": "DOWN*+DRAIN+INVALID_REG",
    }
    first, second, third = nodes.values()
    said = "Xid 79: GPU has fallen off the bus State=UNKNOWN second line with NodeName=nobody"
    assert first.reason == said
    assert first.since == datetime.fromisoformat("2025-06-20T08:12:01")
    assert (second.reason, second.since) == ("", None)
    assert third.reason.startswith("Low RealMemory (reported:2000000 <")
    views = text.scontrol_nodes(data("scontrol-nodes-22.05")).values()
    assert {(view.state, view.reason) for view in views} == {("MIXED", "")}


def test_sinfo_with_reasons_of_several_lines() -> None:
    assert text.sinfo_nodes(data("sinfo-drain-22.05"))["node2"] == "draining"
    states = text.sinfo_nodes(data("sinfo-25.05-handwritten"))
    assert len(states) == 13
    assert states["n3"] == "drained$"
    gone = {name for name, state in states.items() if text.is_gone(state)}
    assert gone == {"n2", "gpu-a001-b", "gpu-a002-b"}


@pytest.mark.parametrize(
    ("state", "gone"),
    [
        ("DOWN", True),
        ("DOWN*", True),
        ("DOWN+NOT_RESPONDING", True),
        ("DOWN*+DRAIN", True),
        ("DOWN+DRAIN+REBOOT_ISSUED", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("pow_dn", True),
        ("FAILING", False),
        ("MIXED+FAIL", False),
        ("MIXED*", False),
        ("MIXED+NOT_RESPONDING", False),
        ("IDLE+DRAIN", False),
        ("draining@", False),
        ("allocated#", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_only_words_for_the_end_of_a_node_mean_its_end(state: str, gone: bool) -> None:
    assert text.is_gone(state) is gone


@pytest.mark.parametrize(
    ("capture", "told"),
    [
        ("scontrol-drain-22.05", {"node2": "drained: to be looked at"}),
        ("scontrol-nodes-drain-22.05", {"node1": "drained: rack 7 cooling: replace pump"}),
        ("scontrol-nodes-reboot-22.05", {"node2": "to be rebooted: new kernel"}),
        ("scontrol-nodes-failing-22.05", {"node2": "expected to fail: bad dimm"}),
        ("scontrol-nodes-maint-22.05", {"node1": "reserved for maintenance"}),
        ("scontrol-nodes-node-lost-22.05", {"node2": "drained: to be looked at"}),
        ("scontrol-nodes-22.05", {}),
    ],
)
def test_a_node_that_the_site_wants_back_is_told_with_the_reason(
    capture: str, told: dict[str, str]
) -> None:
    nodes = text.scontrol_nodes(data(capture)).values()
    assert text.leaving(nodes, (), NOW, "") == told


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("ALLOCATED+DRAIN", "drained: x"),
        ("MIXED*+DRAINING", "drained: x"),
        ("MIXED+DRAIN+REBOOT_REQUESTED", "to be rebooted: x"),
        ("ALLOCATED+POWER_DOWN", "to be powered down: x"),
        ("ALLOCATED+PLANNED", None),
        ("MIXED+COMPLETING", None),
        ("DOWN+DRAIN", None),
        ("RESERVED", None),
        ("", None),
    ],
)
def test_words_for_a_node_that_is_to_leave(state: str, why: str | None) -> None:
    assert text.leaving([node(state, "x")], (), NOW, "").get("n1") == why


def test_reservations_and_the_words_for_none() -> None:
    assert text.scontrol_reservations(data("scontrol-reservations-none-22.05")) == ()
    found = text.scontrol_reservations(data("scontrol-reservations-22.05"))
    assert [(one.name, one.is_maintenance) for one in found] == [
        ("maint_week7", True),
        ("other", False),
        ("far", True),
    ]
    assert found[0].nodes == ("node1", "node2")
    later, course = text.scontrol_reservations(data("scontrol-reservations-25.05-handwritten"))
    assert later.nodes == (*(f"gpu-a{n:03}-b" for n in range(1, 5)), "n7")
    assert (later.is_maintenance, course.is_maintenance) == (True, False)


@pytest.mark.parametrize(
    ("minutes", "own", "is_told"),
    [(0, "", True), (-20, "", False), (600, "", False), (30, "", True), (0, "maint_q4", False)],
)
def test_nodes_leave_half_an_hour_before_a_maintenance_that_is_not_the_runs_own(
    minutes: int, own: str, is_told: bool
) -> None:
    reserved = text.scontrol_reservations(data("scontrol-reservations-25.05-handwritten"))
    now = NOW + timedelta(minutes=minutes)
    nodes = [node("ALLOCATED", name="n7"), node("ALLOCATED", name="n1")]
    told = {"n7": "reserved for maintenance (maint_q4)"} if is_told else {}
    assert text.leaving(nodes, reserved, now, own) == told


def test_a_run_inside_a_maintenance_of_its_own_stays() -> None:
    nodes = [node("ALLOCATED+MAINTENANCE+RESERVED")]
    assert text.leaving(nodes, (), NOW, "mine") == {}
    assert text.leaving(nodes, (), NOW, "") == {"n1": "reserved for maintenance"}
