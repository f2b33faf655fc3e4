"""The supervisor, its agents and the command line."""
