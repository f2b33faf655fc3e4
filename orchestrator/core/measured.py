"""What checkpoints cost so far, and what became of those that the store did not answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCommit:
    """A commit that got no answer from the store: how often, and when last."""

    times: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs as measured, in seconds; None means not measured yet.

    Attributes:
        upload_s: The latest uploads of whole checkpoints, newest last, at most 20.
        stall_s: The latest blocking stalls of a save, newest last, at most 20.
        node_s: Node-seconds of exposure: time with ranks running, times nodes.
    """

    step_s: float | None = None
    stall_s: tuple[float, ...] = ()
    upload_s: tuple[float, ...] = ()
    node_s: float = 0.0
