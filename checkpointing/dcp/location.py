"""Where a DCP checkpoint is: its URL, its commits, and a deadline on everything asked there.

A checkpoint id has a folder of its own:

    data/<save>/rank-00000-0000.bin     raw bytes; every rank has a new <save> for every save
    commits/000001-<nonce>.json         written last; the one with the highest number counts
"""

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, unquote, urlsplit

from checkpointing.errors import CommitRefused, ObjectMissing, StoreMissing, StoreUnavailable
from checkpointing.store.base import ObjectStore, StoreConfig, open_store

Where = str | os.PathLike[str]
_COMMIT: Final = re.compile(r"commits/(\d{6,12})-[0-9a-f]{16}\.json")
_BELOW: Final = re.compile(rf"(.+)/{_COMMIT.pattern}")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A finished save of a checkpoint id."""

    number: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place that checkpoint ids are relative to, or one checkpoint; holds no connection.

    Attributes:
        url: `s3://bucket/prefix` or `file:///folder`.
        endpoint_url: S3 endpoint; None for what the environment says, else AWS.
        region: S3 region.
    """

    url: str
    endpoint_url: str | None = None
    region: str | None = None

    def at(self, checkpoint_id: Where) -> "Location":
        """Return another place: an id is a URL, an absolute path, or relative to this one."""
        text = os.fspath(checkpoint_id)
        if not self.url or "://" in text or Path(text).is_absolute():
            return replace(self, url=as_url(checkpoint_id))
        return replace(self, url=f"{self.url.rstrip('/')}/{text}")

    def open(self, *, make: bool = False) -> ObjectStore:
        """Return the store below this URL.

        Args:
            make: Create the folder of a `file://` URL.
        """
        parts = urlsplit(self.url)
        if make and parts.scheme == "file" and not parts.netloc:
            Path(unquote(parts.path)).mkdir(parents=True, exist_ok=True)
        endpoint = self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3")
        return open_store(
            StoreConfig(
                url=self.url,
                endpoint_url=endpoint or os.environ.get("AWS_ENDPOINT_URL"),
                region=self.region,
            )
        )


def as_url(where: Where) -> str:
    """Return a URL as it is and a path as `file://`."""
    text = os.fspath(where)
    return text if "://" in text else f"file://{quote(str(Path(text).absolute()))}"


def supported(where: Where) -> bool:
    """Tell whether this is a URL that the engine has a store for, or a path."""
    return "://" not in os.fspath(where) or urlsplit(os.fspath(where)).scheme in ("s3", "file")


def list_saves(store: ObjectStore) -> list[Commit]:
    """Return the finished saves of a checkpoint id, newest first."""
    found = []
    for info in store.list("commits/"):
        match = _COMMIT.fullmatch(info.key)
        if match:
            found.append(Commit(number=int(match.group(1)), key=info.key))
    return sorted(found, key=lambda commit: (commit.number, commit.key), reverse=True)


def newest(store: ObjectStore, url: str) -> Commit:
    """Return the save that counts.

    Raises:
        ObjectMissing: There is none. A store that cannot be asked is another error.
    """
    try:
        saves = list_saves(store)
    except StoreMissing as error:
        raise ObjectMissing(f"{url}: no checkpoint: {error}") from error
    if not saves:
        raise ObjectMissing(f"{url}: no checkpoint, nothing is committed here")
    return saves[0]


def find_checkpoints(where: Where, **options: str | None) -> tuple[str, ...]:
    """Return the URLs of all committed checkpoints below a place, the newest last.

    Their order is that of the number that each name ends with, as in `step-100`; others come first.

    Args:
        where: URL or path of a folder of checkpoints.
        options: `endpoint_url` and `region`, as for `EverstepReader`.

    Raises:
        StoreError: The store could not be asked. This is never reported as "none".
    """
    place = Location(url=as_url(where), **options)
    found = {
        match.group(1)
        for info in place.open().list("")
        if (match := _BELOW.fullmatch(info.key)) is not None
    }
    return tuple(place.at(name).url for name in sorted(found, key=_order))


def _order(name: str) -> tuple[int, str]:
    number = re.search(r"(\d{1,18})$", name)
    return int(number.group(1)) if number else -1, name


def put_commit(store: ObjectStore, packed: bytes, nonce: str) -> Commit:
    """Write a document as the newest save."""
    saves = list_saves(store)
    number = saves[0].number + 1 if saves else 1
    key = f"commits/{number:06d}-{nonce}.json"
    if not store.put_if_absent(key, packed) and store.get(key) != packed:
        raise CommitRefused(f"{key}: exists with other content")
    return Commit(number=number, key=key)


def bounded(action: Callable[[], _Answer], deadline_s: float, what: str) -> _Answer:
    """Do something in a thread of its own and give up on it after a while.

    What was given up may still end; nothing that it wrote counts without a commit.

    Raises:
        StoreUnavailable: Not done in time.
    """
    answer: Future[_Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            answer.set_exception(error)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        return answer.result(timeout=deadline_s)
    except TimeoutError as error:
        if answer.done():
            raise
        raise StoreUnavailable(f"{what}: not done within {deadline_s:g} s") from error
