"""What checkpointing needs of a store, and how to open one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from checkpointing.errors import ObjectCorrupt, StoreError
from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.store.transfer import Transfer

MOST_BYTES: Final = 1 << 29
"""A small object, one that `get` returns, is not larger."""

_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._=-/")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where checkpoints go. Holds no secrets: credentials come from the provider chain.

    Attributes:
        url: `s3://bucket/prefix` or `file:///folder`.
        endpoint_url: S3 endpoint, None for AWS.
        region: S3 region.
        max_bytes_per_s: What a node may send to it at most, None for as fast as it takes.
    """

    url: str
    endpoint_url: str | None = None
    region: str | None = None
    max_bytes_per_s: float | None = None

    def to_json(self) -> str:
        """Return the one-line JSON that `from_json` reads."""
        fields = asdict(self)
        if self.max_bytes_per_s is None:
            del fields["max_bytes_per_s"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "StoreConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: Not such a JSON object.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or not isinstance(fields.get("url"), str):
            raise ValueError('a store is a JSON object with at least "url"')
        unknown = set(fields) - {"url", "endpoint_url", "region", "max_bytes_per_s"}
        if unknown:
            raise ValueError(f"unknown keys of a store: {', '.join(sorted(unknown))}")
        most = fields.get("max_bytes_per_s")
        if most is not None and not (type(most) in (int, float) and 0 < most < float("inf")):
            raise ValueError("max_bytes_per_s of a store is a positive number")
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object.

    Attributes:
        key: Key relative to the store's prefix.
        nbytes: Size.
        crc64: CRC64NVME over the whole object when the store knows it without reading, else None.
        modified_at: When it was created, in Unix seconds by the store's clock; known from a list.
    """

    key: str
    nbytes: int
    crc64: int | None = None
    modified_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that was begun and neither completed nor aborted: it costs, and no list shows it.

    Attributes:
        key: Key that it is for, relative to the store's prefix.
        upload_id: What the store calls it.
        started_at: Unix seconds by the store's clock.
    """

    key: str
    upload_id: str
    started_at: float


class ObjectStore(Protocol):
    """Keys and bytes. No verb ever overwrites an object.

    Every verb raises `StoreUnavailable` after bounded retries, `StoreDenied` and `StoreMissing` at
    once.
    """

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create a small object; False when the key exists, whoever wrote it."""
        ...

    def upload(self, key: str, parts: Sequence[memoryview], crc64: int) -> Transfer:
        """Create an object from the concatenation of `parts`, verified end to end.

        An object with the same size and CRC that is already there counts as success.

        Raises:
            ObjectConflict: The key holds other content.
            ObjectCorrupt: The bytes do not have the CRC64NVME `crc64`.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return a small object.

        Raises:
            ObjectMissing: No such key.
            ObjectCorrupt: It has more than `MOST_BYTES`, and nothing was read.
        """
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes from `offset` on.

        Raises:
            ObjectMissing: No such key.
            ObjectCorrupt: The object is shorter.
        """
        ...

    def read_each(
        self, key: str, offset: int, outs: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> None:
        """Fill pieces of memory with neighbouring bytes of an object, from `offset` on.

        Args:
            key: The object.
            offset: Where it begins.
            outs: The memory, none of it empty.
            arrived: Called with the number of each piece, in order, once it is full.

        Raises:
            ObjectMissing: No such key.
            ObjectCorrupt: The object is shorter.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object, None when it does not exist."""
        ...

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """Return all objects whose key begins with `prefix`, sorted by key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        ...

    def open_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """Return the open uploads whose key begins with `prefix`, those of live writers too."""
        ...

    def abort_upload(self, upload: OpenUpload) -> None:
        """Abort one; a missing one is no error. Its writer, if it lives, begins again."""
        ...

    def probe(self) -> None:
        """Check reachability, permissions and conditional puts.

        Raises:
            StoreDenied: With one line that names the store and the fix; so the others.
            StoreMissing: The bucket or folder does not exist.
            StoreUnavailable: No answer.
            ConditionalPutUnsupported: A second conditional put succeeded.
        """
        ...


def check_small(key: str, nbytes: int) -> None:
    """Refuse to read an object whole that is not small.

    Raises:
        ObjectCorrupt: It has more than `MOST_BYTES`.
    """
    if nbytes > MOST_BYTES:
        raise ObjectCorrupt(f"{key}: has {nbytes} bytes, which no document has")


def check_key(key: str) -> str:
    """Return the key if every store can hold it.

    Raises:
        StoreError: It has characters that need escaping somewhere, or empty or dotted parts.
    """
    if not key or not _SAFE.issuperset(key) or any(p in ("", ".", "..") for p in key.split("/")):
        raise StoreError(f"unsafe key {key!r}: use letters, digits, '.', '_', '=', '-' and '/'")
    return key


def open_store(
    config: StoreConfig, pace: Pacer | None = None, *, patience_s: float = 120.0
) -> ObjectStore:
    """Return the store that the URL names; touches nothing yet.

    Args:
        config: Which store.
        pace: The budget to keep to; None for one of this store alone, with the configured cap.
        patience_s: Bound on all tries of one request together; a folder has none.

    Raises:
        StoreError: The URL is neither `s3://bucket[/prefix]` nor `file:///folder`.
    """
    parts = urlsplit(config.url)
    if pace is None:
        pace = Pacer(Budget(max_bytes_per_s=config.max_bytes_per_s))
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from checkpointing.store.directory import DirectoryStore

        return DirectoryStore(Path(unquote(parts.path)), pace)
    if parts.scheme == "s3" and parts.netloc:
        from checkpointing.store.s3 import S3Store  # here, so that others need no boto3

        prefix = parts.path.strip("/")
        return S3Store(
            bucket=parts.netloc,
            prefix=f"{check_key(prefix)}/" if prefix else "",
            endpoint_url=config.endpoint_url,
            region=config.region,
            connect_timeout_s=min(5.0, patience_s),
            read_timeout_s=min(60.0, patience_s),
            deadline_s=patience_s,
            pace=pace,
        )
    raise StoreError(f"store url {config.url!r}: write s3://bucket/prefix or file:///folder")
