"""One writer for a folder that several nodes see.

A lock in the folder keeps the others idle; they take over when its holder dies. On a file system
without such locks all of them work, which costs and harms nothing: what they write is the same.
That it is one folder, and not one per node, is checked: its own id must be the one in the store.
"""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from checkpointing import checked
from checkpointing.errors import CheckpointingError, ManifestInvalid, ObjectMissing
from checkpointing.sealed import seal, unseal
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.documents import read_document

_FORM: Final = "everstep-watched-claim/1"
_LOCK: Final = ".everstep-watch.lock"
_ID: Final = ".everstep-watch.id"


class OtherFolder(CheckpointingError):
    """The prefix in the store belongs to another folder."""


class Lock:
    """An exclusive lock on a directory, held until the process ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _LOCK
        self._descriptor = -1

    def take(self) -> bool:
        """Take it or have it; False while another process does.

        Raises:
            OSError: The directory cannot be written to.
        """
        if self._descriptor >= 0:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            pass  # a file system without locks
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give it back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def claim(store: ObjectStore, prefix: str, directory: Path) -> None:
    """Make the prefix that of this directory.

    Raises:
        OtherFolder: It is that of another one.
        StoreError: The store could not be asked.
        OSError: The directory cannot be written to.
    """
    own = _id_of(directory)
    key = names.claim_key(prefix)
    if store.put_if_absent(key, seal(_FORM, {"id": own})):
        return
    try:
        held = checked.text(unseal(read_document(store, key), _FORM).get("id"), "id")
    except (ManifestInvalid, ObjectMissing) as error:
        raise OtherFolder(f"{key}: cannot be read: {error}") from error
    if held != own:
        raise OtherFolder(
            f"{prefix!r} keeps another folder than {directory}: give this one another name, or, "
            "when every node has a folder of its own, do not call it shared"
        )


def _id_of(directory: Path) -> str:
    path = directory / _ID
    with suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")
    temporary = directory / f"{_ID}.{secrets.token_hex(8)}"
    with temporary.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(16))
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):  # another node was faster: its id counts
            path.hardlink_to(temporary)
    finally:
        temporary.unlink()
    return path.read_text(encoding="ascii")
