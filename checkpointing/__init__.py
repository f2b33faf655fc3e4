"""Checkpoints that are restored bit for bit or not at all.

`Checkpointer` is loaded on first use: importing a small part such as `checkpointing.slot` pulls in
neither boto3 nor numpy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpointing.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> object:
    if name == "Checkpointer":
        from checkpointing.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
