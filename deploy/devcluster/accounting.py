"""slurmdbd with a MariaDB of its own, so that sacct works; reached through a socket, as root.

Run as a module this is the database: it makes an empty one in a tmpfs of its own mount namespace
(on a disk that alone takes seconds) and becomes mariadbd. It goes with the cluster.
"""

import socket
import sys
from contextlib import suppress
from pathlib import Path

from deploy.devcluster import head_init
from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import Plan
from deploy.devcluster.programs import become, listens, run
from deploy.devcluster.units import Units, python

INSTALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
DATABASE = "mariadbd"
DAEMON = "slurmdbd"
# A small database that is thrown away: no size, no care for a power loss.
TUNING = (
    "--no-defaults",
    "--user=root",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-innodb-doublewrite",
)


def folder(state: Path) -> Path:
    """Return where the database is, as only its own process sees it."""
    return state / "database"


def database_socket(state: Path) -> Path:
    """Return the socket of the database."""
    return state / "mariadb.socket"


def start_database(plan: Plan, units: Units) -> None:
    """Start the database; it is not ready yet when this comes back."""
    folder(plan.state).mkdir(exist_ok=True)
    argv = ["unshare", "--mount", "--", *python("accounting"), str(plan.state)]
    units.start(DATABASE, argv)


def start_daemon(plan: Plan, units: Units) -> None:
    """Start slurmdbd once the database is there, and wait until it listens.

    Raises:
        DevclusterError: One of them ended; names the log to read.
    """
    units.wait_ready(DATABASE, lambda: _accepts(str(database_socket(plan.state))), START_TIMEOUT_S)
    # The client library of MariaDB takes the path of "localhost" from this variable.
    env = units.base_env() | {"MYSQL_UNIX_PORT": str(database_socket(plan.state))}
    units.start(DAEMON, head_init.command(plan.state, "slurmdbd", "-D"), env=env)
    units.wait_ready(DAEMON, lambda: listens(plan.slurmdbd_port), START_TIMEOUT_S)


def _accepts(path: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        return True
    return False


def main(state: Path) -> None:
    """Make an empty database and become its server."""
    data = str(folder(state))
    run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=700", "tmpfs", data])
    run(
        [
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"),
            *("--auth-root-authentication-method=socket", "--skip-test-db"),
            "--innodb-log-file-size=8M",
        ],
        timeout_s=INSTALL_TIMEOUT_S,
    )
    argv = ["mariadbd", *TUNING, f"--datadir={data}", "--skip-networking"]
    argv += [f"--socket={database_socket(state)}", f"--pid-file={state}/mariadbd.pid"]
    become(argv)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (DevclusterError, OSError) as error:
        sys.stderr.write(f"devcluster: no database: {error}\n")
        sys.exit(1)
