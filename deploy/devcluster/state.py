"""What is on disk about each cluster, and the lock that lets one command at a time change it."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.devcluster.errors import DevclusterError, NotFound
from deploy.devcluster.plan import MAX_CLUSTERS, ROOT, Plan, Spec
from deploy.devcluster.programs import run

FILE = "cluster.json"
LOCK_PATIENCE_S = 120.0
POLL_S = 0.05


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this command alone; it is created when missing.

    The folder itself is the lock, so nothing is left beside it when it is removed.

    Raises:
        DevclusterError: Another command held it for two minutes.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino == folder.stat().st_ino:
                    yield
                    return
            except BlockingIOError:
                pass
            finally:
                os.close(handle)
        if time.monotonic() > deadline:
            raise DevclusterError(f"another devcluster command holds {folder}; wait or end it")
        time.sleep(POLL_S)


def write(plan: Plan) -> None:
    """Keep the plan; the file appears whole or not at all."""
    plan.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    text = json.dumps(
        {"spec": plan.spec.to_json(), "index": plan.index, "machine": plan.machine}, indent=2
    )
    new = plan.state / f".{FILE}"
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(plan.state / FILE)


def read(name: str, root: Path = ROOT) -> Plan | None:
    """Return the plan of a cluster, or None when there is none or its file is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, DevclusterError):
        kept = json.loads((root / name / FILE).read_text(encoding="utf-8"))
        return Plan(
            spec=Spec.from_json(kept["spec"]),
            index=int(kept["index"]),
            machine=str(kept["machine"]),
            root=root,
        )
    return None


def existing(name: str) -> Plan:
    """Return the plan of a cluster.

    Raises:
        NotFound: There is none; names those there are.
    """
    plan = read(name)
    if plan is None:
        others = ", ".join(names()) or "none"
        raise NotFound(f"no cluster {name} (there are: {others}); bring it up: devcluster up")
    return plan


def names(root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of all clusters, up or half up."""
    return tuple(sorted(file.parent.name for file in root.glob(f"*/{FILE}")))


def reserve(spec: Spec) -> Plan:
    """Choose an index whose subnet and ports nobody uses, and keep the plan.

    Raises:
        DevclusterError: All are taken.
    """
    machine = socket.gethostname().split(".")[0]
    with locked(ROOT):
        plans = [read(name) for name in names()]
        taken = {plan.index for plan in plans if plan is not None}
        routes = run(["ip", "-4", "route", "show", "table", "all"])
        for index in range(MAX_CLUSTERS):
            plan = Plan(spec=spec, index=index, machine=machine)
            if index not in taken and _is_free(plan, routes):
                write(plan)
                return plan
    raise DevclusterError(f"all {MAX_CLUSTERS} subnets and port ranges are in use")


def _is_free(plan: Plan, routes: str) -> bool:
    network = plan.head_address.removesuffix("1")
    if any(word.startswith(network) for word in routes.split()):
        return False
    for port in (plan.slurmctld_port, plan.slurmdbd_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True
