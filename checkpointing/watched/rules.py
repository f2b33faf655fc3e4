"""What is watched, what becomes of it, and what stays on the disk."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.watched import names
from checkpointing.watched.disk import Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What to do with a directory.

    Attributes:
        directory: Where the trainer writes.
        pattern: Names of its checkpoints there.
        prefix: What they are kept under in the store.
        finished: When one is whole.
        delete: Whether to delete what was committed.
        keep: How many of the newest stay on the disk all the same: what a trainer resumes from.
        shared: All nodes see the same directory, so that one of them keeps it.
        node: Name of this node.
        nodes: How many nodes write parts of each entry, when there is no file of attempts.
        attempts: That file.
    """

    directory: Path
    pattern: str
    prefix: str
    finished: Finished = field(default_factory=Finished)
    delete: bool = False
    keep: int = 1
    shared: bool = False
    node: str = ""
    nodes: int = 1
    attempts: Path | None = None

    @property
    def writer(self) -> str:
        """Whose parts this process writes: the node's, or those of all."""
        return "" if self.shared else self.node


def to_stay(ages_ns: Mapping[str, int], keep: int) -> Collection[str]:
    """Return what stays on the disk: the newest by their numbers, and the newest by time.

    After a run went back to an earlier step these are not the same ones, and trainers differ in
    what they then resume from.

    Args:
        ages_ns: When each was changed last.
        keep: How many of each kind.
    """
    if keep <= 0:
        return frozenset()
    by_number = sorted(ages_ns, key=names.age)[-keep:]
    by_time = sorted(ages_ns, key=lambda name: (ages_ns[name], names.age(name)))[-keep:]
    return frozenset((*by_number, *by_time))
