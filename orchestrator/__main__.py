"""`python -m orchestrator` is `everstep`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
