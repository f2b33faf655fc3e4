"""Checkpoints that failed once, known as such over attempts, supervisors and runs.

A checkpoint is in quarantine while the object exists whose key has its step and attempt. What the
object says is for people; it is not needed to know that.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from checkpointing import checked, keys
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.sealed import fetch, seal, unseal
from checkpointing.store.base import ObjectStore

_FORM: Final = "everstep-quarantine/1"
_LONGEST: Final = 1000
_FIELDS: Final = frozenset({"run", "step", "attempt", "why", "who", "at"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Why a checkpoint is not to be used.

    Attributes:
        run: Name of the run.
        step: Finished steps.
        attempt: Attempt that staged it.
        why: What happened, one line.
        who: Who found it: a person, or a part of everstep with the attempt that failed.
        at: When, in Unix seconds; 0 when the record cannot be read.
    """

    run: str
    step: int
    attempt: int
    why: str
    who: str
    at: float

    @property
    def place(self) -> tuple[int, int]:
        """Step and attempt."""
        return self.step, self.attempt

    def pack(self) -> bytes:
        """Return the stored form."""
        return seal(_FORM, asdict(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Quarantined":
        """Read the stored form.

        Raises:
            ManifestInvalid: Not such a record, or altered.
        """
        found = unseal(packed, _FORM)
        checked.exactly(found, _FIELDS, "the record")
        at = found["at"]
        if type(at) not in (int, float) or not 0 <= at < 1e12:
            checked.refuse("at", at)
        return cls(
            run=checked.run_name(found["run"]),
            step=checked.number(found["step"], "step"),
            attempt=checked.number(found["attempt"], "attempt"),
            why=checked.text(found["why"], "why"),
            who=checked.text(found["who"], "who"),
            at=float(at),
        )


def quarantine(
    store: ObjectStore,
    run: str,
    step: int,
    attempt: int,
    *,
    why: str,
    who: str,
    now: Callable[[], float] = time.time,
) -> bool:
    """Keep a checkpoint from being chosen again; False when it was in quarantine before.

    Raises:
        StoreError: The store could not take it.
    """
    record = Quarantined(
        run=run,
        step=step,
        attempt=attempt,
        why=_one_line(why),
        who=_one_line(who),
        at=now(),
    )
    return store.put_if_absent(keys.quarantine_key(run, step, attempt), record.pack())


def lift(store: ObjectStore, run: str, step: int, attempt: int) -> bool:
    """Let a checkpoint be chosen again; False when it was not in quarantine."""
    key = keys.quarantine_key(run, step, attempt)
    if store.head(key) is None:
        return False
    store.delete(key)
    return True


def list_quarantined(store: ObjectStore, run: str) -> tuple[Quarantined, ...]:
    """Return all records of a run, newest checkpoint first; unreadable ones say so.

    Raises:
        StoreError: The store could not be asked.
    """
    found = []
    for info in store.list(keys.quarantine_prefix(run)):
        place = keys.place_of_quarantine(info.key)
        if place is not None and (record := _read(store, run, info.key, place)) is not None:
            found.append(record)
    return tuple(sorted(found, key=lambda record: record.place, reverse=True))


def quarantined_places(store: ObjectStore, run: str) -> frozenset[tuple[int, int]]:
    """Return (step, attempt) of what is in quarantine, as the keys tell without being read.

    Raises:
        StoreError: The store could not be asked.
    """
    places = (keys.place_of_quarantine(i.key) for i in store.list(keys.quarantine_prefix(run)))
    return frozenset(place for place in places if place is not None)


def _read(store: ObjectStore, run: str, key: str, place: tuple[int, int]) -> Quarantined | None:
    try:
        record = fetch(store, key, Quarantined.unpack)
    except ObjectMissing:
        return None  # lifted meanwhile
    except ManifestInvalid as error:
        why = f"the record cannot be read: {error}"
        return Quarantined(run=run, step=place[0], attempt=place[1], why=why, who="", at=0.0)
    if (record.run, *record.place) != (run, *place):
        why = "the record is a copy of another one"
        return Quarantined(run=run, step=place[0], attempt=place[1], why=why, who="", at=0.0)
    return record


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
