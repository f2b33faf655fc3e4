"""What a replica is: one rank's snapshot outside its arena. Its description, and which are kept."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from checkpointing import checked
from checkpointing.stage.arena import PAGE, Capacities

KEPT: Final = 2
_MOST_RANKS: Final = 10**7
_MOST_STEPS: Final = 10**18 - 1
_MOST_ATTEMPTS: Final = 10**9 - 1
_MOST_BYTES: Final = 1 << 50
_MOST_TIERS: Final = (1 << 8) - 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Name:
    """Which snapshot of which rank; in order of age, the oldest first."""

    attempt: int
    step: int
    rank: int
    world: int

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Name":
        """Read the fields of a request or an order.

        Raises:
            ManifestInvalid: A field is missing or out of range.
        """
        world = checked.number(found.get("world"), "world", least=1, most=_MOST_RANKS)
        return cls(
            attempt=checked.number(found.get("attempt"), "attempt", most=_MOST_ATTEMPTS),
            step=checked.number(found.get("step"), "step", most=_MOST_STEPS),
            rank=checked.number(found.get("rank"), "rank", most=world - 1),
            world=world,
        )

    def to_json(self) -> dict[str, int]:
        """Return the fields of a request or a report."""
        return asdict(self)

    @property
    def file(self) -> str:
        """Name of its file: for people; what is in a file says what it is."""
        return (
            f"rank-{self.rank:05d}-of-{self.world:05d}-step-{self.step:012d}"
            f"-attempt-{self.attempt:04d}.replica"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A snapshot as it is described before its bytes come: first its meta, then its extents.

    Attributes:
        name: Which one.
        staged_at: Unix time when it was complete in the rank's arena.
        tiers: Mask of where the rank wants it kept.
        nbytes: Bytes of its extents, gaps included.
        meta_nbytes: Bytes of its meta.
        meta_crc64: CRC64NVME of those.
        meta_room: Bytes that a slot of the rank's arena has for meta.
        data_room: Bytes that it has for extents.
    """

    name: Name
    staged_at: float
    tiers: int
    nbytes: int
    meta_nbytes: int
    meta_crc64: int
    meta_room: int
    data_room: int

    @property
    def total(self) -> int:
        """Bytes that come."""
        return self.meta_nbytes + self.nbytes

    @property
    def capacities(self) -> Capacities:
        """Of the file that it is kept in."""
        return Capacities(meta=self.meta_room, data=self.data_room, slots=1)

    def to_json(self) -> dict[str, Any]:
        """Return the message's fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "name": self.name.to_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Offer":
        """Read a message; every size in it is bounded, and fits the room that it names.

        Raises:
            ManifestInvalid: A field is missing, unknown, or out of range.
        """
        checked.exactly(found, _FIELDS, "an offer")
        checked.exactly(found["name"], _NAME_FIELDS, "the name of an offer")
        staged_at = found["staged_at"]
        if type(staged_at) is not float or not 0 <= staged_at < 1 << 40:
            checked.refuse("staged_at is no time", staged_at)
        meta_room = _room(found["meta_room"], "meta_room", checked.MOST_BYTES)
        data_room = _room(found["data_room"], "data_room", _MOST_BYTES)
        return cls(
            name=Name.from_json(found["name"]),
            staged_at=staged_at,
            tiers=checked.number(found["tiers"], "tiers", most=_MOST_TIERS),
            nbytes=checked.number(found["nbytes"], "nbytes", most=data_room),
            meta_nbytes=checked.number(found["meta_nbytes"], "meta_nbytes", most=meta_room),
            meta_crc64=checked.crc(found["meta_crc64"], "meta_crc64"),
            meta_room=meta_room,
            data_room=data_room,
        )


_FIELDS: Final = frozenset(field.name for field in fields(Offer))
_NAME_FIELDS: Final = frozenset(field.name for field in fields(Name))


def outdated(held: Iterable[Name]) -> set[Name]:
    """Return which replicas are no longer needed.

    Of each rank the newest two stay. Of ranks that are copied to elsewhere by now nothing newer
    comes: what is of an earlier attempt than two whole saves of a later one goes too.
    """
    names = sorted(held, reverse=True)
    dropped: set[Name] = set()
    kept: dict[int, int] = {}
    for name in names:
        kept[name.rank] = kept.get(name.rank, 0) + 1
        if kept[name.rank] > KEPT:
            dropped.add(name)
    if names:
        newest = names[0].attempt
        if len({name.step for name in names if name.attempt == newest}) >= KEPT:
            dropped |= {name for name in names if name.attempt < newest}
    return dropped


def _room(value: object, what: str, most: int) -> int:
    room = checked.number(value, what, most=most)
    if room % PAGE:
        checked.refuse(f"{what} is no whole number of pages", room)
    return room
