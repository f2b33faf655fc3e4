"""What is seen: readings, log signatures, progress, GPU counters, and who is to blame."""
