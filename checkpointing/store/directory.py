"""A folder as a store: the same protocol as S3, for one machine or a shared file system.

A new object is written to a temporary file in the same folder, synced, and linked to its name:
`link` fails when the name is taken, which is the conditional put.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from checkpointing import checksum
from checkpointing.durable import fsync_folder
from checkpointing.errors import (
    ConditionalPutUnsupported,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from checkpointing.store.base import ObjectInfo, OpenUpload, check_key, check_small
from checkpointing.store.pace import Pacer
from checkpointing.store.transfer import Tally, Transfer

_TEMPORARY: Final = ".tmp-"
_BLOCK: Final = 8 << 20
_CHUNK: Final = 1 << 20


class DirectoryStore:
    """Objects as files below an existing folder."""

    def __init__(self, root: Path, pace: Pacer | None = None) -> None:
        self._root = root
        self._pace = pace or Pacer()

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create a small object; False when the key exists."""
        return self._create(key, [memoryview(body)])

    def upload(self, key: str, parts: Sequence[memoryview], crc64: int) -> Transfer:
        """Create an object from `parts`, verified against `crc64`."""
        tally = Tally()
        flat = [part.cast("B") for part in parts if part.nbytes]
        self._sweep(key)
        total = sum(part.nbytes for part in flat)
        if self._create(key, flat, crc64):
            return tally.done(total, "directory")
        path = self._path(key)
        with self._translated(key):
            same = path.stat().st_size == total
            if not same or _crc_of_file(path) != crc64:
                raise ObjectConflict(f"{key}: exists with other content")
        return tally.done(0, "directory")

    def get(self, key: str) -> bytes:
        """Return an object."""
        with self._translated(key), self._path(key).open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            check_small(key, nbytes)
            return file.read(nbytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on."""
        self.read_each(key, offset, [out.cast("B")], lambda _: None)

    def read_each(
        self, key: str, offset: int, outs: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> None:
        """Fill one after the other from `offset` on."""
        with self._translated(key), self._path(key).open("rb", buffering=0) as file:
            file.seek(offset)
            for number, out in enumerate(outs):
                done = 0
                while done < out.nbytes:
                    count = file.readinto(out[done:])
                    if not count:
                        raise ObjectCorrupt(f"{key}: ends at byte {file.tell()}")
                    done += count
                arrived(number)

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object; the CRC is not known without reading."""
        try:
            with self._translated(key):
                return ObjectInfo(key=key, nbytes=self._path(key).stat().st_size)
        except ObjectMissing:
            return None

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """Return all objects below a prefix."""
        self._require_root()
        folder = self._root / prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with self._translated(prefix):
            # Path.walk would do, but needs Python 3.12.
            for base, _, names in os.walk(folder, onerror=fail):
                for name in names:
                    path = Path(base) / name
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix) and not name.startswith(_TEMPORARY):
                        with suppress(FileNotFoundError):  # deleted meanwhile
                            seen = path.stat()
                            found.append(
                                ObjectInfo(key=key, nbytes=seen.st_size, modified_at=seen.st_mtime)
                            )
        self._require_root()  # gone meanwhile is no empty answer
        return tuple(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""
        with self._translated(key):
            self._path(key).unlink(missing_ok=True)

    def open_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """Return the temporary files below a prefix."""
        self._require_root()
        found: list[OpenUpload] = []
        with self._translated(prefix):
            for path in (self._root / prefix.rpartition("/")[0]).rglob(f"{_TEMPORARY}*"):
                name = path.name.removeprefix(_TEMPORARY).rpartition("-")[0]
                key = path.with_name(name).relative_to(self._root).as_posix()
                if name and key.startswith(prefix):
                    with suppress(FileNotFoundError):
                        started_at = path.stat().st_mtime
                        found.append(
                            OpenUpload(key=key, upload_id=path.name, started_at=started_at)
                        )
        return tuple(sorted(found, key=lambda one: (one.key, one.upload_id)))

    def abort_upload(self, upload: OpenUpload) -> None:
        """Remove a temporary file; one that is gone is no error."""
        path = self._path(upload.key).with_name(upload.upload_id)
        if not upload.upload_id.startswith(_TEMPORARY) or "/" in upload.upload_id:
            raise StoreError(f"{upload.upload_id!r} is no temporary file")
        with self._translated(upload.key):
            path.unlink(missing_ok=True)

    def probe(self) -> None:
        """Check that the folder exists, takes files and refuses a second link."""
        self._require_root()
        key = f"probe-{secrets.token_hex(8)}"
        try:
            if not self._create(key, [memoryview(b"probe")]):
                raise StoreUnavailable(f"{self._root}: a fresh name was taken")
            if self._create(key, [memoryview(b"probe")]):
                raise ConditionalPutUnsupported(
                    f"{self._root}: hard links replace files here; use another file system or S3"
                )
        finally:
            self.delete(key)

    def _create(self, key: str, parts: Sequence[memoryview], crc: int | None = None) -> bool:
        self._require_root()
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(8)}")
        with self._translated(key):
            _make_folders(path.parent, self._root)
            try:
                with temporary.open("xb") as file:
                    written = _write_synced(file, parts, self._pace)
                if crc is not None and written != crc:
                    raise ObjectCorrupt(f"{key}: the bytes are not those that were promised")
                path.hardlink_to(temporary)
            except FileExistsError:
                # A network file system may say "exists" about its own link, repeated.
                return temporary.exists() and temporary.stat().st_nlink > 1
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(path.parent)
        return True

    def _sweep(self, key: str) -> None:
        """Remove what a killed uploader left: the key belongs to one rank of one attempt."""
        path = self._path(key)
        with self._translated(key):
            for left in path.parent.glob(f"{_TEMPORARY}{path.name}-{'[0-9a-f]' * 16}"):
                left.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _require_root(self) -> None:
        if not self._root.is_dir():
            raise StoreMissing(f"{self._root}: no such folder; create it or correct the store url")

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._require_root()
            raise ObjectMissing(f"{key}: not in {self._root}") from error
        except PermissionError as error:
            raise StoreDenied(
                f"{self._root}: {error.strerror} for {key}; give this user write permission"
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"{self._root}: {error.strerror or error} for {key}") from error


def _write_synced(file: IO[bytes], parts: Sequence[memoryview], pace: Pacer) -> int:
    """Write and return the CRC of what was written: the parts may change under our hands."""
    crc = 0
    for part in parts:
        for start in range(0, part.nbytes, _CHUNK):
            piece = bytes(part[start : start + _CHUNK])
            pace.nbytes(len(piece))
            crc = checksum.crc64(piece, crc)
            file.write(piece)
    file.flush()
    os.fsync(file.fileno())
    return crc


def _make_folders(folder: Path, root: Path) -> None:
    """Create folders below the root; each new name is synced into its parent."""
    missing = []
    while folder != root and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)


def _crc_of_file(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = checksum.crc64(block, crc)
    return crc
