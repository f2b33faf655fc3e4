"""The devcluster itself, for real: namespaces, Slurm, faults, and that nothing is left behind."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.devcluster import features, packages
from deploy.devcluster.client import Devcluster
from deploy.devcluster.plan import ROOT
from deploy.devcluster.processes import is_alive, kill, pids
from tests.integration.devclusters import MARKS, shares

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 60.0
NODES = ("node1", "node2", "node3")
OPTIONS = ("--nodes", "3", "--gpus", "4", "--grace", "3", "--set", "SlurmdTimeout=6", *shares())
# Two names that no person uses and that two runs of the tests at once do not share.
NAME, OTHER = (f"{letter}{os.getpid()}" for letter in "tu")


pytestmark = MARKS


def eventually(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def net_namespaces(of: tuple[int, ...]) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid in of}


def left_behind(cluster: Devcluster, namespaces: set[str]) -> list[str]:
    """Everything on this machine that bears the cluster's name or lives in its networks."""
    found = []
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    found += [line for line in mounts.splitlines() if str(cluster.state) in line]
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    found += [line for line in links.stdout.splitlines() if f"dc-{cluster.name}" in line]
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    found += [line for line in named.stdout.splitlines() if cluster.name in line]
    groups = Path("/sys/fs/cgroup").rglob(f"devcluster.{cluster.name}*")
    found += [str(group) for group in groups]
    found += [str(path) for path in ROOT.glob(f"{cluster.name}*")]
    for pid in pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            inside = str(Path(f"/proc/{pid}/ns/net").readlink()) in namespaces
        except OSError:
            continue
        if is_alive(pid) and (inside or str(cluster.state) in command):
            found.append(f"{pid} {command}")
    return found


def all_namespaces(cluster: Devcluster) -> set[str]:
    """The network namespaces of every process that the warden started, but the machine's own."""
    marked = []
    for pid in pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"DEVCLUSTER_STATE={cluster.state}".encode() in environ.split(b"\0"):
            marked.append(pid)
    return net_namespaces(tuple(marked)) - net_namespaces((os.getpid(),))


@pytest.fixture(scope="module")
def running() -> Iterator[Devcluster]:
    cluster = Devcluster(NAME)
    try:
        cluster.do("up", *OPTIONS)
        yield cluster
    finally:
        cluster.do("down")


@pytest.fixture
def cluster(running: Devcluster) -> Iterator[Devcluster]:
    """The module's cluster, whole again after every test."""
    yield running
    running.do("start-slurmctld")
    running.slurm("scancel", "--full", "--user=root")
    for name, node in running.nodes().items():
        if not node["power"]:
            running.do("power-on", name)
        if (node["link"], node["slow"], node["drop"], node["cpus"]) != ("up", None, None, None):
            running.do("heal", name)
        if node["slurm"] != "idle":
            running.do("undrain", name)
    eventually(
        "all nodes are idle",
        lambda: all(node["slurm"] == "idle" for node in running.nodes().values()),
    )


def test_a_job_on_all_nodes_sees_each_as_a_machine_of_its_own(cluster: Devcluster) -> None:
    script = (
        "echo $(hostname) $(cat /etc/hostname) $CUDA_VISIBLE_DEVICES "
        "$(ls /sys/class/net | tr '\\n' ,) $(getent hosts $(hostname) | cut -d' ' -f1) "
        "$(ls -d /proc/[0-9]* | wc -l) $(ls -A /tmp /dev/shm | grep -vc :)"
    )
    words = ["--ntasks-per-node=1", "--gpus-per-node=2"]
    lines = cluster.slurm("srun", "-N3", *words, "sh", "-c", script).splitlines()
    seen = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(seen) == set(NODES)
    for name, (file, gpus, devices, address, processes, entries) in seen.items():
        assert file == name
        assert gpus == "0,1"
        assert set(devices.split(",")) == {"eth0", "lo", ""}
        assert address == cluster.nodes()[name]["address"]
        assert int(processes) < 20  # the machine alone has more
        # An empty line between the two listings, and what this checkout needs in /tmp.
        assert int(entries) <= 1 + shares().count("--share")


def test_nodes_reach_each_other_and_the_machine_by_name(cluster: Devcluster) -> None:
    server = "import socket; s = socket.create_server(('', 5000)); s.accept()"
    ask = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 10)"
    with subprocess.Popen(
        cluster.argv("shell", "node1", "--", sys.executable, "-c", server)
    ) as listening:
        eventually("node1 listens", lambda: ":1388 " in cluster.on("node1", "cat", "/proc/net/tcp"))
        cluster.on("node2", sys.executable, "-c", ask, "node1")
        assert listening.wait(PATIENCE_S) == 0
    assert "node3" in cluster.do("shell", "head", "--", "getent", "hosts", "node3")


def test_up_again_changes_nothing_and_other_options_are_refused(cluster: Devcluster) -> None:
    before = cluster.nodes()
    assert "was up already" in cluster.do("up", *OPTIONS)
    assert cluster.nodes() == before
    refused = cluster.attempt("up", "--nodes", "2")
    assert refused.code == 2
    assert "devcluster down" in refused.stderr


def test_power_off_ends_every_process_and_the_memory_of_a_node(cluster: Devcluster) -> None:
    cluster.on(
        "node2", "sh", "-c", "echo precious > /dev/shm/kept; setsid sleep 1000 >/dev/null 2>&1 &"
    )
    cluster.on("node1", "sh", "-c", "echo other > /dev/shm/kept")
    init = cluster.nodes()["node2"]["pid"]
    assert isinstance(init, int)
    namespace = net_namespaces((init,))
    assert [pid for pid in pids() if _in(pid, namespace)]
    cluster.do("power-off", "node2")
    still = [pid for pid in pids() if is_alive(pid) and _in(pid, namespace)]
    assert still == []
    assert cluster.nodes()["node2"]["power"] is False
    refused = cluster.attempt("shell", "node2", "--", "true")
    assert refused.code == 1
    assert "power-on node2" in refused.stderr
    cluster.do("power-on", "node2")
    assert cluster.on("node2", "ls", "/dev/shm") == ""
    assert cluster.on("node1", "cat", "/dev/shm/kept") == "other\n"
    cluster.on("node1", "rm", "/dev/shm/kept")


def _in(pid: int, namespaces: set[str]) -> bool:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink()) in namespaces
    except OSError:
        return False


def test_a_node_that_loses_power_falls_silent_instead_of_closing_connections(
    cluster: Devcluster,
) -> None:
    serve = (
        "import socket, time\ns = socket.create_server(('', 5001)); c, _ = s.accept()\n"
        "while True: c.sendall(b'x'); time.sleep(0.05)"
    )
    read = (
        "import socket\nc = socket.create_connection(('node2', 5001), 10); c.settimeout(3)\n"
        "c.recv(1); print('connected', flush=True)\n"
        "try:\n    while c.recv(100): pass\n    print('closed')\n"
        "except TimeoutError: print('silent')\nexcept OSError as error: print(error)"
    )
    server = cluster.argv("shell", "node2", "--", sys.executable, "-c", serve)
    with subprocess.Popen(server) as serving:
        eventually("node2 listens", lambda: ":1389 " in cluster.on("node2", "cat", "/proc/net/tcp"))
        client = cluster.argv("shell", "node1", "--", sys.executable, "-u", "-c", read)
        with subprocess.Popen(client, stdout=subprocess.PIPE, text=True) as reading:
            assert reading.stdout is not None
            assert reading.stdout.readline() == "connected\n"
            cluster.do("power-off", "node2")
            assert reading.stdout.read() == "silent\n"
        serving.wait(PATIENCE_S)


@pytest.mark.slow
def test_slurm_sees_the_loss_of_a_node_and_takes_it_back(cluster: Devcluster) -> None:
    cluster.do("power-off", "node3")
    eventually("it is down", lambda: str(cluster.nodes()["node3"]["slurm"]).startswith("down"))
    cluster.do("power-on", "node3")
    eventually("it is idle again", lambda: cluster.nodes()["node3"]["slurm"] == "idle")


def test_a_partitioned_node_lives_on_unreached_until_it_is_healed(cluster: Devcluster) -> None:
    pid = cluster.nodes()["node2"]["pid"]
    ask = (
        "import socket, sys\ntry: socket.create_connection(('node2', 1), 2)\n"
        "except ConnectionRefusedError: print('there')\nexcept OSError: print('nobody')"
    )
    assert cluster.on("node1", sys.executable, "-c", ask) == "there\n"
    cluster.do("partition", "node2")
    now = cluster.nodes()["node2"]
    assert (now["link"], now["pid"]) == ("cut", pid)
    assert cluster.on("node1", sys.executable, "-c", ask) == "nobody\n"
    cluster.do("heal", "node2")
    assert cluster.nodes()["node2"]["link"] == "up"
    assert cluster.on("node1", sys.executable, "-c", ask) == "there\n"


def test_a_dropped_port_is_lost_and_others_are_not(cluster: Devcluster) -> None:
    ask = (
        "import socket, sys\ntry: socket.create_connection(('node2', int(sys.argv[1])), 2)\n"
        "except ConnectionRefusedError: print('there')\nexcept OSError: print('nobody')"
    )
    cluster.do("drop", "node2", "--port", "5002")
    assert cluster.nodes()["node2"]["drop"] == "port 5002 100%"
    assert cluster.on("node1", sys.executable, "-c", ask, "5002") == "nobody\n"
    assert cluster.on("node1", sys.executable, "-c", ask, "5003") == "there\n"
    cluster.do("heal", "node2")
    assert cluster.on("node1", sys.executable, "-c", ask, "5002") == "there\n"


def test_a_slow_cable_and_a_slow_cpu_are_seen_and_healed(cluster: Devcluster) -> None:
    lacking = {feature.name for feature in features.probe() if not feature.works}
    if {"tbf", "cpu cgroup"} & lacking:
        pytest.skip(f"this kernel lacks {lacking}")
    cluster.do("slow", "node1", "--rate", "5mbit")
    cluster.do("throttle", "node1", "--cpu", "0.1")
    now = cluster.nodes()["node1"]
    assert (now["slow"], now["cpus"]) == ("5 Mbit/s", 0.1)
    work = "import time; a = time.monotonic(); sum(range(3 * 10**6)); b = time.process_time()\n"
    work += "print(b / (time.monotonic() - a))"
    assert float(cluster.on("node1", sys.executable, "-S", "-c", work)) < 0.6
    cluster.do("heal", "node1")
    now = cluster.nodes()["node1"]
    assert (now["slow"], now["cpus"]) == (None, None)


def test_a_kernel_without_netem_says_so_in_one_line(cluster: Devcluster) -> None:
    lacking = {feature.name for feature in features.probe() if not feature.works}
    words = ("slow", "node1", "--rate", "5mbit", "--delay", "5ms")
    if "netem" not in lacking:
        cluster.do(*words)
        return
    refused = cluster.attempt(*words)
    assert refused.code == 3
    assert refused.stderr == "devcluster: slow needs netem, which this kernel lacks\n"


def test_a_drained_node_takes_no_job_until_it_is_undrained(cluster: Devcluster) -> None:
    cluster.do("drain", "node1", "--reason", "to be looked at")
    eventually("it is drained", lambda: cluster.nodes()["node1"]["slurm"] == "drained")
    assert "to be looked at" in cluster.slurm("sinfo", "-R")
    assert cluster.slurm("srun", "-N2", "hostname").split() in (
        ["node2", "node3"],
        ["node3", "node2"],
    )
    cluster.do("undrain", "node1")
    cluster.do("undrain", "node1")
    assert len(cluster.slurm("srun", "-N3", "hostname").split()) == 3


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


@pytest.mark.parametrize("how", [(), ("--hard",)])
def test_jobs_go_on_while_slurmctld_is_away(cluster: Devcluster, how: tuple[str, ...]) -> None:
    marks = ROOT / cluster.name / "marks"
    marks.unlink(missing_ok=True)
    script = f"for i in $(seq 1000); do echo $i >> {marks}; sleep 0.1; done"
    words = ["-o", "/dev/null", "--wrap", script]
    job = cluster.slurm("sbatch", "--parsable", *words).strip()
    eventually("the job runs", marks.exists)
    # Killed before it wrote down that the job runs, Slurm would not know; no fault of ours.
    cluster.slurm("scontrol", "update", f"JobId={job}", f"Comment=runs{len(how)}")
    saved = cluster.state / "slurmctld" / "job_state"
    eventually("Slurm saved it", lambda: f"runs{len(how)}".encode() in _content(saved))
    cluster.do("stop-slurmctld", *how)
    cluster.do("stop-slurmctld", *how)
    lines = marks.read_text(encoding="utf-8")
    eventually("it goes on", lambda: marks.read_text(encoding="utf-8") != lines)
    assert {node["slurm"] for node in cluster.nodes().values()} == {"unknown"}
    cluster.do("start-slurmctld")
    assert cluster.slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"


@pytest.mark.slow
def test_a_preempted_job_is_warned_ended_and_its_nodes_taken(cluster: Devcluster) -> None:
    warned = cluster.state / "warned"
    task = f"trap 'echo $SLURMD_NODENAME >> {warned}' TERM; while true; do sleep 0.1; done"
    script = f'srun bash -c "{task}"'.replace("$", "\\$")
    words = ["-N2", "--no-requeue", "-o", "/dev/null", "--wrap", script]
    job = cluster.slurm("sbatch", "--parsable", *words).strip()
    eventually("it runs", lambda: "RUNNING" in cluster.slurm("squeue", "-h", "-j", job, "-o", "%T"))
    said = cluster.do("preempt", job, "--hold", "1")
    urgent = re.findall(r"job (\d+) takes", said)[0]
    eventually(
        "it was preempted",
        lambda: "PREEMPTED" in cluster.slurm("scontrol", "show", "job", job),
    )
    eventually(
        "the urgent job had its turn",
        lambda: "COMPLETED" in cluster.slurm("scontrol", "show", "job", urgent),
    )
    assert set(warned.read_text(encoding="utf-8").split()) == {"node1", "node2"}
    again = cluster.attempt("preempt", job)
    assert (again.code, again.stderr.count("\n")) == (1, 1)


def test_two_clusters_side_by_side_share_nothing(cluster: Devcluster) -> None:
    other = Devcluster(OTHER)
    try:
        other.do("up", "--nodes", "2", "--gpus", "0")
        ours, theirs = all_namespaces(cluster), all_namespaces(other)
        assert ours
        assert theirs
        assert not ours & theirs
        assert not {n["address"] for n in cluster.nodes().values()} & {
            n["address"] for n in other.nodes().values()
        }
        assert other.slurm("srun", "-N2", "hostname").split().count("node1") == 1
        other.do("power-off", "node1")
        assert cluster.slurm("srun", "-w", "node1", "hostname") == "node1\n"
        other.do("down")
        assert left_behind(other, theirs) == []
        assert len(cluster.slurm("srun", "-N3", "hostname").split()) == 3
    finally:
        other.do("down")


def test_down_leaves_nothing_and_may_be_repeated() -> None:
    cluster = Devcluster(OTHER)
    hosts = Path("/etc/hosts").read_bytes()
    devices = sorted(Path("/dev").iterdir())
    try:
        cluster.do("up", "--nodes", "2")
        cluster.slurm("sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 1000")
        cluster.do("throttle", "node1", "--cpu", "0.5")
        cluster.do("partition", "node2")
        namespaces = all_namespaces(cluster)
        assert len(namespaces) == 3  # the switch and two nodes
        assert len(left_behind(cluster, namespaces)) > 3
    finally:
        cluster.do("down")
    assert left_behind(cluster, namespaces) == []
    assert Path("/etc/hosts").read_bytes() == hosts
    assert sorted(Path("/dev").iterdir()) == devices
    assert "was not there" in cluster.do("down")


def test_up_after_a_crash_cleans_up_and_comes_up() -> None:
    cluster = Devcluster(OTHER)
    try:
        cluster.do("up", "--nodes", "2", "--gpus", "0")
        old = all_namespaces(cluster)
        kill(int((cluster.state / "warden.pid").read_text(encoding="ascii").split()[0]))
        eventually(
            "everything died with the warden",
            lambda: not [pid for pid in pids() if is_alive(pid) and _in(pid, old)],
        )
        assert " up in " in cluster.do("up", "--nodes", "2", "--gpus", "0")
        assert len(cluster.slurm("srun", "-N2", "hostname").split()) == 2
    finally:
        cluster.do("down")
    assert left_behind(cluster, old) == []


def test_a_failed_start_takes_everything_down_and_names_the_log() -> None:
    cluster = Devcluster(OTHER)
    failed = cluster.attempt("up", "--nodes", "1", "--set", "SelectType=select/nonsense")
    assert failed.code == 1
    log = Path(re.findall(r"see (\S+)", failed.stderr)[0].rstrip(","))
    assert "select" in log.read_text(encoding="utf-8")
    assert len(failed.stderr.splitlines()) <= 2  # what the kernel lacks, and what went wrong
    cluster.do("down")
    assert left_behind(cluster, set()) == []


def test_a_folder_of_the_machine_is_shared_when_asked_for(tmp_path: Path) -> None:
    cluster = Devcluster(OTHER)
    (tmp_path / "in").write_text("from the machine", encoding="utf-8")
    try:
        cluster.do("up", "--nodes", "1", "--gpus", "0", "--share", str(tmp_path))
        assert cluster.on("node1", "cat", str(tmp_path / "in")) == "from the machine"
        cluster.on("node1", "sh", "-c", f"echo back > {tmp_path}/out; echo own > /tmp/own")
        assert (tmp_path / "out").read_text(encoding="utf-8") == "back\n"
        assert not Path("/tmp/own").exists()
    finally:
        cluster.do("down")


def test_with_accounting_sacct_knows_what_became_of_a_job() -> None:
    missing = packages.missing(accounting=True)
    if missing:
        pytest.skip(f"NO ACCOUNTING IS TESTED: apt-get install {' '.join(missing)}")
    cluster = Devcluster(OTHER)
    try:
        cluster.do("up", "--nodes", "1", "--gpus", "0", "--accounting")
        words = ["-o", "/dev/null", "--wrap", "exit 3"]
        job = cluster.slurm("sbatch", "--parsable", *words).strip()
        argv = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode"]
        eventually("it is told", lambda: cluster.slurm(*argv).strip() == "FAILED|3:0")
        namespaces = all_namespaces(cluster)
    finally:
        cluster.do("down")
    assert left_behind(cluster, namespaces) == []


def test_the_script_says_what_is_wrong_in_one_line() -> None:
    script = CHECKOUT / "deploy" / "devcluster" / "devcluster"
    argv = [str(script), "power-off", "node1", "--name", OTHER]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
