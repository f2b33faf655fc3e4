"""The peers, as their users start them: torchrun and NVRx's ft_launcher in a job of Slurm.

The script saves nothing under them and starts over from step 0, so they are spared what ours pays
for a restore. torchrun is told not to share its rendezvous' store with the ranks: with one store
for all restarts the ranks find each other's old addresses in it, and often never start again.

The elastic launchers lose a node whose kernel still closes its connections. After a silent loss, as
ours has, they did not go on within three minutes: nothing ends a collective before its timeout.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.mttr import machine as m
from tests.bench.mttr.ours import RANKS_PER_NODE, SETTLE_STEPS, STEP_S

PORT = 29_400
START_S = 120.0
RECOVERY_S = 400.0
NVRX = "nvidia-resiliency-ext==0.4.1"  # the release whose recovery was measured before
INSTALL_S = 240.0

TORCHRUN = "{python} -m torch.distributed.run"
FT_LAUNCHER = "{python} -m nvidia_resiliency_ext.fault_tolerance.launcher"

BATCH = """\
#!/bin/bash
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {srun} {launcher} --nnodes={nnodes} --nproc-per-node={ranks} --max-restarts={restarts} \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$host:{port}" \\
    {script} {folder} {step_s}
"""
NO_KILL = ("--no-kill", "--no-requeue")
SRUN_NO_KILL = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way to run the script that is compared with ours."""

    name: str
    launcher: str = TORCHRUN
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    nnodes: str = "3"
    restarts: int = 10
    needs_closed_connections: bool = False


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a peer."""

    total_s: float
    load: float = field(default_factory=lambda: os.getloadavg()[0])


RESTARTS = Peer(name="torchrun --max-restarts on the same nodes", sbatch=NO_KILL)
REQUEUE = Peer(name="sbatch --requeue + torchrun, SlurmdTimeout=15", sbatch=("--requeue",))
ELASTIC = Peer(
    name="torchrun --nnodes=2:3 in one --no-kill allocation, told by closed connections",
    sbatch=NO_KILL,
    srun=SRUN_NO_KILL,
    nnodes="2:3",
    needs_closed_connections=True,
)
NVRX_ELASTIC = Peer(
    name="NVRx 0.4.1 ft_launcher --nnodes=2:3, the same way",
    launcher=FT_LAUNCHER,
    sbatch=NO_KILL,
    srun=SRUN_NO_KILL,
    nnodes="2:3",
    needs_closed_connections=True,
)


@dataclass(frozen=True, slots=True)
class Job:
    """A peer's running job."""

    machine: m.Machine
    folder: Path
    job: str
    nodes: tuple[str, ...]

    def alive(self) -> None:
        """Raise Failed when the job has ended."""
        shown = self.machine.cluster.slurm("squeue", "-h", "-j", self.job, "-t", "all", "-o", "%T")
        if shown.split()[:1] not in (["PENDING"], ["CONFIGURING"], ["RUNNING"], ["COMPLETING"]):
            raise m.Failed(f"its job is {shown.strip() or 'gone'}: {self._tail()}")
        time.sleep(0.2)

    def _tail(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


@contextmanager
def started(machine: m.Machine, peer: Peer, python: Path | None = None) -> Iterator[Job]:
    """Submit a peer's job and wait until it trains; afterwards the nodes are idle again."""
    folder = machine.new_folder("theirs")
    script = folder / "batch.sh"
    script.write_text(batch_script(peer, folder, python or Path(sys.executable)), encoding="utf-8")
    words = [*peer.sbatch, "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=2"]
    words += [f"--chdir={folder}", f"--output={folder}/log", "--open-mode=append"]
    try:
        job = machine.cluster.slurm("sbatch", "--parsable", *words, str(script)).strip()
        running = Job(machine, folder, job, ())
        m.settled(folder, SETTLE_STEPS, 0.0, START_S, running.alive)
        listed = machine.cluster.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
        names = machine.cluster.slurm("scontrol", "show", "hostnames", listed).split()
        yield Job(machine, folder, job, tuple(names))
    finally:
        machine.make_whole()


def batch_script(peer: Peer, folder: Path, python: Path) -> str:
    """Return what sbatch is given. Pure."""
    return BATCH.format(
        srun=" ".join(peer.srun),
        launcher=peer.launcher.format(python=shlex.quote(str(python))),
        nnodes=peer.nnodes,
        ranks=RANKS_PER_NODE,
        restarts=peer.restarts,
        port=PORT,
        script=Path(__file__).with_name("script.py"),
        folder=folder,
        step_s=STEP_S,
    )


def rank_killed(machine: m.Machine, times: int) -> list[Recovery]:
    """SIGKILL a rank of one job again and again."""
    found = []
    with started(machine, RESTARTS) as job:
        for number in range(times):
            if number:
                m.settled(job.folder, SETTLE_STEPS, time.time(), START_S, job.alive)
            rank = (1 + number) % (3 * RANKS_PER_NODE)
            at = m.signal_rank(job.folder, rank, signal.SIGKILL)
            new = m.first_new_step(job.folder, at, RECOVERY_S, job.alive)
            found.append(Recovery(new.at - at))
    return found


def node_lost(
    machine: m.Machine, peer: Peer, place: int, python: Path | None = None
) -> list[Recovery]:
    """End the node at a place in the job; 0 hosts batch script and rendezvous."""
    with started(machine, peer, python) as job:
        cut = machine.crash if peer.needs_closed_connections else machine.power_off
        at = cut(job.nodes[place])
        new = m.first_new_step(job.folder, at, RECOVERY_S, job.alive)
        return [Recovery(new.at - at)]


def install_nvrx(folder: Path) -> Path:
    """Install NVRx beside the project's packages, not among them; return its interpreter.

    Raises:
        Failed: It cannot be had here; says why.
    """
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site / "project.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    argv = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NVRX]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise m.Failed(f"pip install {NVRX} took longer than {INSTALL_S:.0f} s") from error
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise m.Failed(f"pip install {NVRX}: {why[-1]}")
    return python
