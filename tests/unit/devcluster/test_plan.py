import ipaddress
from pathlib import Path

import pytest

from deploy.devcluster.errors import NotFound, UsageError
from deploy.devcluster.plan import MAX_CLUSTERS, MAX_NODES, Plan, Spec


def test_every_node_has_its_own_name_address_and_card() -> None:
    nodes = Plan(spec=Spec(nodes=MAX_NODES), index=3).nodes
    assert len({node.name for node in nodes}) == MAX_NODES
    assert len({node.address for node in nodes}) == MAX_NODES
    assert len({node.mac for node in nodes}) == MAX_NODES
    assert (nodes[0].name, nodes[0].address) == ("node1", "10.77.3.11")


def test_all_addresses_are_inside_the_subnet() -> None:
    plan = Plan(spec=Spec(nodes=MAX_NODES), index=9)
    subnet = ipaddress.ip_network(plan.subnet)
    for address in (plan.head_address, *(node.address for node in plan.nodes)):
        assert ipaddress.ip_address(address) in subnet.hosts()


def test_two_clusters_share_no_port_subnet_link_folder_or_card() -> None:
    plans = [Plan(spec=Spec(name=f"c{index}"), index=index) for index in range(MAX_CLUSTERS)]
    ports = [
        port
        for plan in plans
        for port in (plan.slurmctld_port, plan.slurmd_port, plan.slurmdbd_port)
    ]
    assert len(set(ports)) == len(ports)
    assert max(ports) < 32768  # below the range that Linux hands out by itself
    for values in (
        {plan.subnet for plan in plans},
        {plan.link for plan in plans},
        {plan.state for plan in plans},
        {plan.nodes[0].mac for plan in plans},
    ):
        assert len(values) == len(plans)


def test_the_longest_name_fits_into_what_linux_allows() -> None:
    plan = Plan(spec=Spec(name="abcdefghijk", prefix="abcdefghijk", nodes=MAX_NODES), index=63)
    assert len(plan.link) <= 15
    assert all(len(node.name) <= 15 for node in plan.nodes)
    assert len(str(plan.munge_socket)) < 108


@pytest.mark.parametrize("name", ["", "Dev", "a-b", "a" * 12, "1a", "head", "switch", "a/b", "a.b"])
def test_a_name_that_would_not_work_is_refused_with_the_option(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        Spec(name=name)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--nodes", {"nodes": 0}),
        ("--nodes", {"nodes": MAX_NODES + 1}),
        ("--gpus", {"gpus": -1}),
        ("--cpus", {"cpus": 0}),
        ("--grace", {"grace_s": -1}),
        ("--shm-size", {"shm_size": "lots"}),
        ("--tmp-size", {"tmp_size": "0"}),
        ("--share", {"share": ("/home",)}),
        ("--share", {"share": ("/tmpfoo",)}),
        ("--set", {"settings": ("SlurmdTimeout",)}),
    ],
)
def test_a_wrong_option_is_named(option: str, values: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=option):
        Spec(**values)  # type: ignore[arg-type]


def test_a_node_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match=r"node9.*node1 to node4"):
        Plan(spec=Spec(nodes=4), index=0).node("node9")


def test_a_spec_comes_back_from_json_as_it_was() -> None:
    spec = Spec(nodes=7, share=("/tmp/a",), settings=("KillWait=9",), accounting=True)
    assert Spec.from_json(spec.to_json()) == spec


def test_everything_of_a_cluster_is_below_its_folder() -> None:
    plan = Plan(spec=Spec(name="x"), index=0, root=Path("/r"))
    for path in (plan.slurm_conf, plan.munge_socket, plan.devices, plan.log("a"), plan.spool("n")):
        assert path.is_relative_to("/r/x")
