"""A copy that runs beside training, until a fence."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing import leaves as leaf_bytes
from checkpointing.stage.copying import Copy
from checkpointing.stage.crew import Crew, Task
from checkpointing.stage.cuda import SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A leaf that may not change before the fence.

    Attributes:
        number: Of its extent.
        name: Of its extent.
        leaf: The plain tensor or array.
        version: torch's count of its changes; None for an array.
    """

    number: int
    name: str
    leaf: Any
    version: int | None

    @property
    def is_changed(self) -> bool:
        """Whether torch knows of a change."""
        return self.version is not None and version_of(self.leaf) != self.version


class Flight:
    """Copies and sums on the crew's threads, then seals the slot.

    Args:
        copy: Whose tasks these are.
        watched: What is copied late.
        seal: Makes the slot count.
        needs_fence: Seal only when `fence` was called in time.
        compares: Sum what is watched before the copy and again at the fence, which finds every
            change, also one that came before its copy. Costs two readings of all of it.
        events: What the streams of GPUs have to reach.
    """

    def __init__(
        self,
        copy: Copy,
        watched: Sequence[Watched],
        seal: Callable[[], None],
        *,
        needs_fence: bool,
        compares: bool,
        events: Sequence[tuple[SideStream, Any]] = (),
    ) -> None:
        self._copy = copy
        self._watched = watched
        self._seal = seal
        self._needs_fence = needs_fence or compares
        self._compares = compares
        self._before = [leaf_bytes.crc_of(w.leaf) for w in watched] if compares else []
        self._events = events
        self._lock = threading.Lock()
        self._copied, self._summed = threading.Event(), threading.Event()
        self._is_fenced = self._is_compared = self._is_settled = False
        self._errors: list[BaseException] = []
        self._changed: list[str] = []

    def start(self, crew: Crew, copies: Sequence[Task], sums: Sequence[Task]) -> None:
        """Begin; `sums` are of what the GPUs copy, once they have."""

        def copied(error: BaseException | None) -> None:
            self._note(error)
            self._copied.set()
            self._land()

        def summed(error: BaseException | None) -> None:
            self._note(error)
            self._summed.set()
            self._land()

        for tasks, then in ((copies, copied), (sums, summed)):
            if tasks:
                crew.start(tasks, then)
            else:
                then(None)

    def fence(self) -> None:
        """Wait until the state may change; for a GPU only what is queued from now on waits."""
        if self._is_fenced:
            return
        if self._events and not self._compares:
            self._compare_versions()
            for side, event in self._events:
                side.hold(event)
        else:
            self._summed.wait()
        self._copied.wait()
        if self._compares and not self._errors:
            self._changed += self._compare_sums()
        self._is_fenced = True
        self._land()

    def join(self, *, abandon: bool = False) -> list[str]:
        """Wait for the end and return what changed too early, for which the slot does not count.

        Args:
            abandon: Do not let it count in any case, unless it does already.

        Raises:
            BaseException: What a thread met.
        """
        if not abandon:
            self.fence()
        self._copied.wait()
        self._summed.wait()
        if not abandon:
            self._land()  # the thread that was last may not have come to it yet
        with self._lock:
            self._is_settled = True
        if self._errors:
            raise self._errors[0]
        return sorted(set(self._changed))

    @property
    def awaits_fence(self) -> bool:
        """Whether the slot would count only after a fence that nobody has called yet."""
        return self._needs_fence and not self._is_fenced

    def _note(self, error: BaseException | None) -> None:
        if error is not None:
            self._errors.append(error)

    def _land(self) -> None:
        """Seal when everything is there and nothing speaks against it."""
        if not (self._copied.is_set() and self._summed.is_set()):
            return
        with self._lock:
            if self._is_settled or (self._needs_fence and not self._is_fenced):
                return
            self._is_settled = True
            self._compare_versions()
            if not (self._errors or self._changed):
                try:
                    self._seal()
                except Exception as error:  # noqa: BLE001 - raised by `join`
                    self._errors.append(error)

    def _compare_sums(self) -> list[str]:
        copied = self._copy.result().extents
        return [
            w.name
            for w, before in zip(self._watched, self._before, strict=True)
            if not before == copied[w.number] == leaf_bytes.crc_of(w.leaf)
        ]

    def _compare_versions(self) -> None:
        """Look once, before the fence lets anybody change what is watched."""
        if not self._is_compared:
            self._is_compared = True
            self._changed += [w.name for w in self._watched if w.is_changed]


def version_of(leaf: Any) -> int | None:
    """Return torch's count of in-place changes; None for what has none."""
    return int(leaf._version) if leaf_bytes.is_tensor(leaf) else None  # noqa: SLF001 - its only way
