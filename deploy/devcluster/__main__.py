"""`python -m deploy.devcluster`: the same as the script `deploy/devcluster/devcluster`."""

import sys

from deploy.devcluster.cli import main
from deploy.devcluster.lifecycle import stop_on_signals

if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
