import pytest

from deploy.devcluster import render
from deploy.devcluster.plan import Plan, Spec


def _keys(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if "=" in line and " " not in line.split("=")[0]]
    return dict(line.split("=", 1) for line in lines)


def test_slurm_conf_says_what_the_tests_of_recovery_rely_on() -> None:
    keys = _keys(render.slurm_conf(Plan(spec=Spec(), index=2)))
    assert keys["SlurmctldHost"] == "head(10.77.2.1)"
    assert keys["KillWait"] == "5"
    assert keys["SlurmdTimeout"] == "15"
    assert keys["ReturnToService"] == "2"
    assert keys["PreemptType"] == "preempt/partition_prio"
    assert keys["AuthInfo"] == "socket=/run/devcluster/dev/munge.socket"


def test_slurm_conf_has_every_node_once_with_its_gpus() -> None:
    text = render.slurm_conf(Plan(spec=Spec(nodes=3, gpus=2, cpus=5), index=0))
    nodes = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert [line.split()[0] for line in nodes] == [f"NodeName=node{n}" for n in (1, 2, 3)]
    assert all("Gres=gpu:2" in line and "CPUs=5" in line for line in nodes)


def test_without_gpus_there_is_no_word_of_them() -> None:
    plan = Plan(spec=Spec(gpus=0), index=0)
    assert "gpu" not in render.slurm_conf(plan).lower()
    assert render.gres_conf(plan) == ""


def test_gres_conf_names_a_device_for_each_gpu() -> None:
    text = render.gres_conf(Plan(spec=Spec(nodes=3, gpus=4), index=0))
    assert text == "NodeName=node[1-3] Name=gpu File=/run/devcluster/dev/dev/gpu[0-3]\n"


def test_only_the_urgent_partition_preempts() -> None:
    text = render.slurm_conf(Plan(spec=Spec(grace_s=7), index=0))
    batch, urgent = (line for line in text.splitlines() if line.startswith("PartitionName="))
    assert "Default=YES" in batch
    assert "GraceTime=7" in batch
    assert "PreemptMode=REQUEUE" in batch
    assert "PriorityTier=1 " in batch
    assert "Default=NO" in urgent
    assert "PriorityTier=10 " in urgent


@pytest.mark.parametrize("written", ["SlurmdTimeout=300", "slurmdtimeout=300"])
def test_a_setting_replaces_ours_however_it_is_spelt(written: str) -> None:
    text = render.slurm_conf(Plan(spec=Spec(settings=(written,)), index=0))
    lines = [line for line in text.splitlines() if line.lower().startswith("slurmdtimeout")]
    assert lines == ["SlurmdTimeout=300"]


def test_an_unknown_setting_is_added() -> None:
    plan = Plan(spec=Spec(settings=("RebootProgram=/sbin/reboot",)), index=0)
    assert _keys(render.slurm_conf(plan))["RebootProgram"] == "/sbin/reboot"


def test_accounting_is_there_only_when_asked_for() -> None:
    without = render.slurm_conf(Plan(spec=Spec(), index=0))
    keys = _keys(render.slurm_conf(Plan(spec=Spec(accounting=True), index=1)))
    assert "Accounting" not in without
    assert keys["AccountingStoragePort"] == str(Plan(spec=Spec(), index=1).slurmdbd_port)
    assert keys["AccountingStoragePass"] == "/run/devcluster/dev/munge.socket"


def test_hosts_know_every_node_and_the_machine_by_both_its_names() -> None:
    lines = render.hosts(Plan(spec=Spec(nodes=2), index=1, machine="box")).splitlines()
    assert "10.77.1.1 head box" in lines
    assert "10.77.1.12 node2" in lines
    assert lines[0] == "127.0.0.1 localhost"


@pytest.mark.parametrize(
    ("version", "plugin"),
    [((22, 5), "cgroup/v1"), ((23, 11), "cgroup/v1"), ((24, 5), "disabled"), ((25, 5), "disabled")],
)
def test_no_version_of_slurm_looks_for_cgroups(version: tuple[int, int], plugin: str) -> None:
    assert render.cgroup_conf(version) == f"CgroupPlugin={plugin}\n"
