"""The first process of a node: makes the node's own view of the machine, starts slurmd, reaps.

It runs as pid 1 in fresh network, UTS, IPC, PID and mount namespaces. Everything it mounts is seen
only there and goes with the node: a power loss takes /dev/shm and /tmp along.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import Plan
from deploy.devcluster.programs import run
from deploy.devcluster.state import read
from deploy.devcluster.units import Units

NETWORK_TIMEOUT_S = 60.0
POLL_S = 0.02
# The null device: opening it works, and Slurm asks only that a GPU be a character device.
NULL_DEVICE = os.makedev(1, 3)


def main(state: Path, name: str) -> None:
    """Become the node; comes back only when it is killed or cannot start."""
    plan = read(state.name, state.parent)
    if plan is None:
        raise DevclusterError(f"{state} tells no plan")
    socket.sethostname(name)
    _own_folders(plan, name)
    _own_files(plan, name)
    _own_sys(plan, name)
    _devices(plan)
    _await_network()
    command = ["slurmd", "-D", "-N", name, "-f", str(plan.slurm_conf)]
    subprocess.Popen(command, env=Units(state).base_env(), cwd="/")
    _reap_for_ever()


def _own_folders(plan: Plan, name: str) -> None:
    """Mount this node's /tmp and /dev/shm; what is shared with the machine shines through."""
    holds = plan.spool(name) / "share"
    kept = []
    for number, shared in enumerate(plan.spec.share):
        hold = holds / str(number)
        hold.mkdir(parents=True, exist_ok=True)
        run(["mount", "--bind", shared, str(hold)])
        kept.append((hold, Path(shared)))
    for folder, size in (("/dev/shm", plan.spec.shm_size), ("/tmp", plan.spec.tmp_size)):  # noqa: S108
        run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777,nosuid,nodev", "tmpfs", folder])
    for hold, path in kept:
        path.mkdir(parents=True, exist_ok=True)
        run(["mount", "--move", str(hold), str(path)])


def _own_files(plan: Plan, name: str) -> None:
    """Names of the cluster in /etc, and a spool from which scripts may run."""
    spool = plan.spool(name)
    (spool / "hostname").write_text(f"{name}\n", encoding="ascii")
    for source, target in (
        (plan.state / "hosts", Path("/etc/hosts")),
        (plan.state / "resolv.conf", Path("/etc/resolv.conf")),
        (spool / "hostname", Path("/etc/hostname")),
    ):
        if target.exists():
            run(["mount", "--bind", str(source), str(target)])
    # /run is often mounted noexec, and slurmd executes batch scripts from its spool.
    run(["mount", "--bind", str(spool), str(spool)])
    run(["mount", "-o", "remount,bind,exec", str(spool)])


def _own_sys(plan: Plan, name: str) -> None:
    """Show this node's network devices in /sys, with the machine's cgroups where they were."""
    cgroups = plan.spool(name) / "cgroup"
    cgroups.mkdir(exist_ok=True)
    with suppress(DevclusterError):  # some containers forbid it; /sys then shows the machine's
        run(["mount", "--rbind", "/sys/fs/cgroup", str(cgroups)])
        run(["mount", "-t", "sysfs", "sysfs", "/sys"])
        run(["mount", "--rbind", str(cgroups), "/sys/fs/cgroup"])
        run(["umount", "-R", "-l", str(cgroups)])


def _devices(plan: Plan) -> None:
    """Make the character devices that Slurm takes for GPUs."""
    devices = str(plan.devices)
    run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755,nosuid", "tmpfs", devices])
    for number in range(plan.spec.gpus):
        os.mknod(plan.devices / f"gpu{number}", stat.S_IFCHR | 0o666, NULL_DEVICE)


def _await_network() -> None:
    """Wait until the machine's side has plugged the network in and configured it."""
    routes = Path("/proc/net/route")
    deadline = time.monotonic() + NETWORK_TIMEOUT_S
    while "eth0\t00000000" not in routes.read_text(encoding="ascii"):
        if time.monotonic() > deadline:
            raise DevclusterError("nobody plugged the network in")
        time.sleep(POLL_S)


def _reap_for_ever() -> None:
    """Reap whatever ends; slurmd may end, the node stays on as a real machine does."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except DevclusterError as error:
        sys.stderr.write(f"devcluster: {sys.argv[2]} does not start: {error}\n")
        sys.exit(1)
