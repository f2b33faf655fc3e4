"""Saves one state by DCP: python -m tests.faults.dcp_saver URL ENDPOINT VALUE."""

import sys

from tests.faults.test_dcp import save


def main() -> None:
    url, endpoint, value = sys.argv[1:]
    save(url, endpoint, float(value))


if __name__ == "__main__":
    main()
