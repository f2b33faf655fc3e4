"""Debian packages: which programs are needed, and getting what is missing when root."""

import os
import sys

from deploy.devcluster.errors import PreconditionError
from deploy.devcluster.programs import find, run

INSTALL_TIMEOUT_S = 600.0
# Program to package; the names are those of Debian 12.
BASE = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}


def missing(*, accounting: bool) -> tuple[str, ...]:
    """Return the packages whose programs are not there."""
    wanted = BASE | (ACCOUNTING if accounting else {})
    lacking = {package for program, package in wanted.items() if find(program) is None}
    return tuple(sorted(lacking))


def ensure(*, accounting: bool) -> None:
    """Install what is missing.

    Raises:
        PreconditionError: Something is missing and cannot be installed from here.
    """
    wanted = missing(accounting=accounting)
    if not wanted:
        return
    options = ("install", "--no-install-recommends", *wanted)
    if find("apt-get") is None:
        raise PreconditionError(f"missing, and no apt-get here: {' '.join(wanted)}; install them")
    if os.geteuid() != 0:
        raise PreconditionError(
            f"not root, and packages are missing; run: sudo apt-get {' '.join(options)}"
        )
    sys.stderr.write(f"devcluster: installing {' '.join(wanted)}\n")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], timeout_s=INSTALL_TIMEOUT_S, env=env)
    run(["apt-get", "-y", "-qq", *options], timeout_s=INSTALL_TIMEOUT_S, env=env)
    still = missing(accounting=accounting)
    if still:
        raise PreconditionError(f"installed, but programs are still missing of: {' '.join(still)}")


def require_root(command: str) -> None:
    """Refuse to go on without root.

    Raises:
        PreconditionError: This user is not root.
    """
    if os.geteuid() != 0:
        raise PreconditionError(f"{command} needs root: namespaces, devices, cgroups; use sudo")
