"""One process per node that takes staged snapshots to the store."""
