"""Progress of ranks: who has been in one phase for longer than it allows."""
