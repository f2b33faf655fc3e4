"""`python -m deploy.devcluster`: the same as the script `deploy/devcluster/devcluster`."""

import sys

from deploy.devcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
