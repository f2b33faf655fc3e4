"""One process per node: starts and reaps ranks, watches them, keeps their checkpoints."""
