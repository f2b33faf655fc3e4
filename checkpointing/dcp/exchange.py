"""One rank fetches, the others of the job get it from there.

Through torch's key-value store and not by a collective: DCP does not tell a reader which ranks
take part in a load, and a rank that loads alone must not wait for others.
"""

import hashlib
import time
import zlib
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

_MOST: Final = 4 << 20  # more is fetched by every rank: the store is one process
_WAIT_S: Final = 60.0
_POLL_S: Final = 0.005


def fetch_once(name: str, fetch: Callable[[], bytes]) -> bytes:
    """Return what `fetch` returns, called on one rank if there is a job around this process.

    Args:
        name: Names the content, which never changes.
        fetch: Gets it; called here as well when the rank that was first does not deliver.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return fetch()
    try:
        store = distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name
        key = f"everstep/{hashlib.sha256(name.encode()).hexdigest()}"
        if store.add(f"{key}/claimed", 1) == 1:
            return _fetch_for_all(store, key, fetch)
        found = _wait(store, key)
    except (dist.DistError, AttributeError):
        return fetch()
    return found if found is not None else fetch()


def _fetch_for_all(store: distributed_c10d.Store, key: str, fetch: Callable[[], bytes]) -> bytes:
    packed = b""
    try:
        found = fetch()
        shorter = zlib.compress(found, 1)
        packed = shorter if len(shorter) <= _MOST else b""
    finally:
        store.set(key, packed.hex())  # "" sends the others to the source
    return found


def _wait(store: distributed_c10d.Store, key: str) -> bytes | None:
    """Return what the first rank put there; by asking, since a wait would hold up other threads."""
    deadline = time.monotonic() + _WAIT_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    packed = bytes.fromhex(store.get(key).decode())
    return zlib.decompress(packed) if packed else None
