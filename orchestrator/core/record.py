"""An event in the journal: one line of it."""

from dataclasses import dataclass

from orchestrator.core.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which message of which agent an event came from; makes redelivery harmless.

    `n` counts an incarnation's messages from 1; one message makes one event, and an agent's
    messages arrive in order.
    """

    node: str
    incarnation: str
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the journal: `seq` counts from 1 without gaps, `at` is Unix time in seconds."""

    seq: int
    at: float
    epoch: int
    event: Event
    origin: Origin | None = None
