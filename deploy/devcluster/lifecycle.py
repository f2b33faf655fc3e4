"""Brings a cluster up and takes it down; both may be repeated, and both clean up after a crash."""

import shutil
import signal
from contextlib import suppress
from pathlib import Path

from deploy.devcluster import cgroup, daemons, features, network, packages, state
from deploy.devcluster.errors import DevclusterError, UsageError
from deploy.devcluster.plan import ROOT, Plan, Spec
from deploy.devcluster.programs import succeeds
from deploy.devcluster.units import Units

READY = "ready"


def up(spec: Spec) -> tuple[Plan, bool, str | None]:
    """Bring a cluster up.

    Returns:
        The plan; whether it was new (False: the same was up already); a line about what the kernel
        lacks, or None.

    Raises:
        UsageError: A cluster of this name is up and differs.
        PreconditionError: The machine lacks something.
        DevclusterError: Something did not start; everything was taken down again.
    """
    packages.ensure(accounting=spec.accounting)
    packages.require_root("up")
    for path in spec.share:
        if not Path(path).is_dir():
            raise UsageError(f"--share {path}: no such folder")
    lacks = features.lacking(features.probe())
    with state.locked(ROOT / spec.name):
        old = state.read(spec.name)
        if old is not None and is_up(old):
            if old.spec != spec:
                raise UsageError(
                    f"cluster {spec.name} is up with other options; first: "
                    f"devcluster down --name {spec.name}"
                )
            return old, False, lacks
        _clean(spec.name)
        plan = state.reserve(spec)
        units = Units(plan.state)
        try:
            daemons.write_files(plan)
            units.open()
            daemons.start_all(plan, units)
            (plan.state / READY).touch()
        except DevclusterError:
            _clean(spec.name, keep="log")  # the message names files there
            raise
        except BaseException:
            _remove(spec.name)
            raise
    return plan, True, lacks


def is_up(plan: Plan) -> bool:
    """Whether a cluster came up fully and its warden still runs."""
    return (plan.state / READY).exists() and Units(plan.state).warden_pid() is not None


def down(name: str) -> bool:
    """Take a cluster down and remove everything of it; returns whether there was one."""
    packages.require_root("down")
    folder = ROOT / name
    if not folder.exists():
        return False
    with state.locked(folder):
        there = any(folder.iterdir())
        _remove(name)
    return there


def _remove(name: str) -> None:
    """End and remove everything of a cluster; needs its lock."""
    _clean(name)
    (ROOT / name).rmdir()
    with suppress(OSError):  # other clusters may be there
        ROOT.rmdir()


def _clean(name: str, keep: str = "") -> None:
    """End and remove everything of a cluster but its folder, which is the lock.

    Args:
        name: The cluster.
        keep: Name of a folder in it that stays for a person to read, until the next up or down.
    """
    # A cluster needs no more than its name to be cleaned: its plan may never have been written.
    plan = state.read(name) or Plan(spec=Spec(name=name), index=0)
    Units(plan.state).close()
    network.remove(plan)
    cgroup.remove(plan)
    for mount in _mounts_below(plan.state):
        succeeds(["umount", "-l", mount])
    for path in plan.state.iterdir():
        if path.name == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _mounts_below(folder: Path) -> list[str]:
    """Mounts on the machine's side; there should be none."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    points = [line.split()[1] for line in lines]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that a half-made cluster goes."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
