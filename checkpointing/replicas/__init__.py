"""The process of a node that copies staged snapshots to another node and to a disk, and back."""
