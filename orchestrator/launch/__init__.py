"""How nodes are asked for: one allocation, one agent on each node."""
