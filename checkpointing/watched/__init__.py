"""Keeps the checkpoint folders of trainers that write their own.

`python -m checkpointing.watched` uploads every finished folder, verifies it, commits it, and then
deletes exactly what was uploaded.
"""
