"""Training data: where the tokens come from, and in which order they are read."""
