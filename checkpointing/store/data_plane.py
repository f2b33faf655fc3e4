"""Who sends the bytes: the way of one body from the arena to S3.

The protocol around it (create, complete, commit, retries, budget) is the same for both. The native
client of awscrt is taken when it is asked for; see `choose` for why it is not the first choice.
"""

import os
import threading
from dataclasses import dataclass
from typing import Final, Protocol

from checkpointing.errors import StoreError
from checkpointing.store.s3_client import Connection
from checkpointing.store.window import Window

VARIABLE: Final = "EVERSTEP_DATA_PLANE"
_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a body goes: an object of its own, or a part of an open upload.

    Attributes:
        key: Full key.
        upload_id: The open upload, None for a whole object that must not exist yet.
        number: Number of the part, from 1.
    """

    key: str
    upload_id: str | None = None
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What the store answered.

    Attributes:
        etag: Its name for these bytes.
        waited_s: How long the body was held back by the budget.
    """

    etag: str
    waited_s: float


class GaveUp(StoreError):
    """The request was cancelled: its answer is not wanted any more."""


class DataPlane(Protocol):
    """Sends bodies whose CRC64NVME is known; raises what its client raises."""

    @property
    def name(self) -> str:
        """Its name in the environment and in reports."""
        ...

    def put(self, target: Target, window: Window, crc: int, cancelled: threading.Event) -> Sent:
        """Send a body; `GaveUp` when it was cancelled meanwhile."""
        ...


def choose(connection: Connection) -> DataPlane:
    """Return the plane that the environment names, or the better one.

    boto3 comes first: with bodies that are neither hashed nor copied it needs about half the CPU
    per byte of the native client, which reads every part into a buffer of its own.

    Raises:
        StoreError: The environment names something else, or what is not installed.
    """
    name = os.environ.get(VARIABLE, _AUTO) or _AUTO
    if name in (_AUTO, "boto3"):
        from checkpointing.store.boto3_plane import Boto3Plane

        return Boto3Plane(connection)
    if name != "awscrt":
        raise StoreError(f"{VARIABLE}={name}: write auto, boto3 or awscrt")
    try:
        from checkpointing.store.awscrt_plane import AwscrtPlane
    except ImportError as error:
        raise StoreError(f"{VARIABLE}={name}: {error}; install awscrt 0.38.1 or newer") from error
    return AwscrtPlane(connection)
