"""What decides, as pure functions of values: no clock, no I/O, no randomness."""
