"""Turns into a program that takes the machine for the cluster's head node.

It runs in fresh UTS and mount namespaces: the host name is `head`, /etc/hosts knows the nodes;
processes, network and files are the machine's.
"""

import socket
import sys
from pathlib import Path

from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import HEAD
from deploy.devcluster.programs import become, run
from deploy.devcluster.units import python


def command(state: Path, *argv: str) -> list[str]:
    """Return the command that runs a program as on the head."""
    return ["unshare", "--uts", "--mount", "--", *python("head_init"), str(state), *argv]


def main(state: Path, argv: list[str]) -> None:
    """Set the names, then become the program."""
    socket.sethostname(HEAD)
    run(["mount", "--bind", str(state / "hosts"), "/etc/hosts"])
    become(argv)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except (DevclusterError, OSError) as error:
        sys.stderr.write(f"devcluster: {error}\n")
        sys.exit(1)
