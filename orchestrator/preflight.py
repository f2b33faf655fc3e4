"""What is checked before anything is started: everything outside the TOML that it names."""

import errno
import logging
import os
import shutil
import socket
from pathlib import Path

from checkpointing.errors import STORE_AWAY, StoreError
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from orchestrator.config import RunConfig
from orchestrator.config_sections import is_reachable
from orchestrator.errors import PreconditionError
from orchestrator.launch.slurm_commands import SlurmError, kill_wait_s
from orchestrator.preflight_folders import check_folders

log = logging.getLogger(__name__)

SLURM_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


def preflight(config: RunConfig, *, needs_store: bool = True) -> ObjectStore | None:
    """Check everything outside the TOML; return the opened store, None when there is none.

    Args:
        config: The run.
        needs_store: Whether a store that is away is an error: of a run that is under way already
            the ranks may train on meanwhile, and somebody has to look after them.

    Raises:
        PreconditionError: One line that names the key and the fix.
    """
    _check_command(config)
    check_folders(config)
    _check_port(config)
    _check_slurm(config)
    checkpoint = config.checkpoint
    if checkpoint.store is None:
        return None
    where = StoreConfig(
        url=checkpoint.store, endpoint_url=checkpoint.endpoint_url, region=checkpoint.region
    )
    try:
        store = open_store(where)
        store.probe()
    except StoreError as error:
        if needs_store or not isinstance(error, STORE_AWAY):
            raise PreconditionError(f"checkpoint.store: {error}") from error
        log.warning("going on without the store until it is back: %s", error)
    return store


def _check_command(config: RunConfig) -> None:
    workdir, argv = config.job.workdir, config.argv
    if not workdir.is_dir():
        raise PreconditionError(f"job.workdir: no directory {workdir}; create or correct it")
    # As execvp(3) does it in the working directory: a name with a slash is a path, others are not.
    program = str(workdir / argv[0]) if "/" in argv[0] else argv[0]
    path = config.job.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None:
        where = f"in {workdir}" if "/" in argv[0] else "in PATH"
        raise PreconditionError(f"job.command: no program {argv[0]!r} {where}; correct it")
    script = _script_of(argv)
    if script.endswith(".py") and not (workdir / script).is_file():
        raise PreconditionError(
            f"job.command: no script {script} in {workdir}; correct job.command or job.workdir"
        )


def _script_of(argv: tuple[str, ...]) -> str:
    """Return the script that a Python interpreter is to run, "" for none and other programs."""
    if not Path(argv[0]).name.startswith("python"):
        return ""
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word in ("-X", "-W"):
            next(words, None)
        elif "m" in word or "c" in word:  # a module, or the program itself
            return ""
    return ""


def _check_slurm(config: RunConfig) -> None:
    if config.nodes.launcher != "slurm":
        return
    if missing := [name for name in SLURM_PROGRAMS if shutil.which(name) is None]:
        text = f"nodes.launcher: no {', '.join(missing)} in PATH; start where Slurm's commands are"
        raise PreconditionError(text)
    host = config.server.host
    address = str(socket.getaddrinfo(host, None)[0][4][0])
    if not is_reachable(address):
        raise PreconditionError(
            f"server.host: {host} is {address} here, which other nodes cannot reach; give the "
            "address of this machine that Slurm's nodes can connect to"
        )
    _check_kill_wait(config)


def _check_kill_wait(config: RunConfig) -> None:
    """Refuse a run whose agents would be killed before they have ended their ranks."""
    leave_s = config.timeouts.leave_s
    try:
        kill_wait = kill_wait_s()
    except SlurmError as error:
        raise PreconditionError(
            f"nodes.launcher: cannot ask Slurm for its KillWait: {error}; try again when it answers"
        ) from error
    if leave_s >= kill_wait:
        raise PreconditionError(
            f"timeouts.leave_s: {leave_s:g} s, but Slurm here kills {kill_wait:g} s after SIGTERM "
            f"(its KillWait); choose less than {kill_wait:g}, and timeouts.kill_grace_s below it"
        )


def _check_port(config: RunConfig) -> None:
    host, port = config.server.host, config.server.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family):
            return
    except socket.gaierror as error:
        raise PreconditionError(
            f"server.host: no address {host}: {error.strerror}; give one of this machine"
        ) from error
    except OSError as error:
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        key = "server.host" if is_elsewhere else "server.port"
        fix = (
            "give one of this machine" if is_elsewhere else "choose another, or 0 for any free one"
        )
        raise PreconditionError(
            f"{key}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; {fix}"
        ) from error


def timeouts_table(config: RunConfig) -> tuple[tuple[str, float, str], ...]:
    """Return (name, seconds, meaning) of every timeout in force, shortest first."""
    times = config.timeouts
    rows = (
        ("heartbeat_s", times.heartbeat_s, "an agent reports its ranks this often"),
        ("agent_lost_s", times.agent_lost_s, "a silent agent is lost; on a dead machine sooner"),
        ("kill_grace_s", times.kill_grace_s, "from SIGTERM to SIGKILL when ranks stop"),
        ("start_s", times.start_s, "an agent must have started its ranks"),
        ("fetch_s", times.fetch_s, "copies of snapshots must be back on their nodes"),
        ("stop_save_s", times.stop_save_s, "a planned stop lets the ranks save"),
        ("launch_s", times.launch_s, "enough nodes must be there"),
        ("final_upload_s", times.final_upload_s, "the last checkpoint must be in the store"),
        ("step_s", times.step_s, "a step that takes longer is a hang"),
        ("init_s", times.init_s, "import, rendezvous and restore may take this long"),
        ("leave_s", times.leave_s, "an agent that Slurm sent SIGTERM has ended its ranks and left"),
        ("supervisor_lost_s", times.supervisor_lost_s, "an agent alone ends its ranks"),
    )
    return tuple(sorted(rows, key=lambda row: row[1]))
