"""The files that the daemons read, as text: pure functions of the plan."""

from deploy.devcluster.plan import HEAD, SETTING, Plan

# Version from which "disabled" is a value of CgroupPlugin; source: cgroup.conf(5) of 24.05.
CGROUP_CAN_BE_DISABLED = (24, 5)
BATCH = "batch"
URGENT = "urgent"


def slurm_conf(plan: Plan) -> str:
    """Return slurm.conf; keys given with --set replace those here, unknown ones are added."""
    keys = _daemons(plan) | _behaviour(plan)
    if plan.spec.accounting:
        keys |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": plan.head_address,
            "AccountingStoragePort": str(plan.slurmdbd_port),
            "AccountingStoragePass": str(plan.munge_socket),
            "JobAcctGatherType": "jobacct_gather/linux",
        }
    names = {key.lower(): key for key in keys}
    for setting in plan.spec.settings:
        match = SETTING.fullmatch(setting)
        assert match is not None, "checked by Spec"
        keys[names.get(match[1].lower(), match[1])] = match[2]
    lines = [f"{key}={value}" for key, value in keys.items()]
    return "\n".join([*lines, "", *_nodes(plan), "", *_partitions(plan), ""])


def _daemons(plan: Plan) -> dict[str, str]:
    state = plan.state
    return {
        "ClusterName": plan.spec.name,
        "SlurmctldHost": f"{HEAD}({plan.head_address})",
        "SlurmctldPort": str(plan.slurmctld_port),
        "SlurmdPort": str(plan.slurmd_port),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={plan.munge_socket}",
        "StateSaveLocation": str(state / "slurmctld"),
        "SlurmdSpoolDir": f"{state}/spool/%n",
        "SlurmctldLogFile": str(plan.log("slurmctld")),
        "SlurmdLogFile": f"{state}/log/slurmd-%n.log",
        "SlurmctldPidFile": str(state / "slurmctld.pid"),
        "SlurmdPidFile": f"{state}/slurmd-%n.pid",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "MailProg": "/bin/true",
    }


def _behaviour(plan: Plan) -> dict[str, str]:
    keys = {
        # Containers often lack the cgroups that Slurm's own plugins want.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # A small machine may pose as large nodes.
        "SlurmdParameters": "config_overrides",
        # As quick as Slurm can be, so that tests need not wait for its rounds.
        "SchedulerParameters": (
            "sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0"
        ),
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "15",
        "KillWait": "5",
        "MinJobAge": "300",
        "ReturnToService": "2",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": "1",
    }
    if plan.spec.gpus:
        keys["GresTypes"] = "gpu"
    return keys


def _nodes(plan: Plan) -> list[str]:
    spec = plan.spec
    shape = (
        f"CPUs={spec.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1 "
        f"RealMemory={spec.memory_mb} State=UNKNOWN"
    )
    gpus = f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    return [f"NodeName={node.name} NodeAddr={node.address} {shape}{gpus}" for node in plan.nodes]


def _partitions(plan: Plan) -> list[str]:
    common = "Nodes=ALL State=UP MaxTime=INFINITE DefaultTime=INFINITE"
    low = f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={plan.spec.grace_s}"
    high = "Default=NO PriorityTier=10 PreemptMode=OFF"
    return [f"PartitionName={BATCH} {common} {low}", f"PartitionName={URGENT} {common} {high}"]


def gres_conf(plan: Plan) -> str:
    """Return gres.conf; slurmd looks at the devices on its own node."""
    if not plan.spec.gpus:
        return ""
    names = f"{plan.spec.prefix}[1-{plan.spec.nodes}]"
    return f"NodeName={names} Name=gpu File={plan.devices}/gpu[0-{plan.spec.gpus - 1}]\n"


def cgroup_conf(version: tuple[int, int]) -> str:
    """Return cgroup.conf: no cgroups at all.

    No plugin that was chosen uses them; naming one spares slurmd a look at what is mounted, which
    fails in many containers.

    Args:
        version: Of slurmd, as (22, 5).
    """
    plugin = "disabled" if version >= CGROUP_CAN_BE_DISABLED else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def slurmdbd_conf(plan: Plan) -> str:
    """Return slurmdbd.conf; the database is reached through a socket, as root."""
    lines = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={plan.munge_socket}",
        "DbdHost": HEAD,
        "DbdAddr": plan.head_address,
        "DbdPort": str(plan.slurmdbd_port),
        "SlurmUser": "root",
        "LogFile": str(plan.log("slurmdbd")),
        "PidFile": str(plan.state / "slurmdbd.pid"),
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm",
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def hosts(plan: Plan) -> str:
    """Return the /etc/hosts of every node: itself, the others, and the machine as the head."""
    machine = f" {plan.machine}" if plan.machine not in ("localhost", HEAD) else ""
    lines = ["127.0.0.1 localhost", f"{plan.head_address} {HEAD}{machine}"]
    lines += [f"{node.address} {node.name}" for node in plan.nodes]
    return "\n".join([*lines, ""])


def resolv_conf() -> str:
    """Return the /etc/resolv.conf of every node: no name server.

    The resolver then asks the node itself, which refuses at once; a server that cannot be reached
    from the node's network would cost ten seconds for each unknown name.
    """
    return "# devcluster: names come from /etc/hosts\noptions timeout:1 attempts:1\n"
