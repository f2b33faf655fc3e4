"""A real multi-node Slurm on one Debian machine, with faults at will; see README.md."""
