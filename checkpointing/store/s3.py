"""S3 as a store: conditional creates only, CRC64NVME from memory to object."""

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Final

from checkpointing import checksum
from checkpointing.errors import (
    ConditionalPutUnsupported,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    StoreUnavailable,
)
from checkpointing.store.base import ObjectInfo, OpenUpload, check_small
from checkpointing.store.data_plane import DataPlane, Target, choose
from checkpointing.store.download import Download
from checkpointing.store.multipart import MultipartUpload, Sender, part_nbytes
from checkpointing.store.pace import Pacer
from checkpointing.store.s3_client import Connection
from checkpointing.store.s3_errors import KeyExists, UploadGone
from checkpointing.store.s3_pages import OBJECTS, UPLOADS, pages
from checkpointing.store.transfer import Tally, Transfer
from checkpointing.store.window import Window, split

_BLOCK: Final = 8 << 20
_SIP: Final = 1 << 20


class S3Store:
    """One prefix of one bucket.

    Args:
        bucket: Name of the bucket.
        prefix: What every key begins with; empty or ending with "/".
        endpoint_url: None for AWS.
        region: Region, None for what the environment says.
        connect_timeout_s: Bound on one connect.
        read_timeout_s: Bound on one silence of the server.
        attempts: Tries of one small request.
        deadline_s: Bound on all tries of one request together, that of a part too.
        pace: The budget to keep to, None for one of this store alone.
    """

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        region: str | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        attempts: int = 6,
        deadline_s: float = 120.0,
        pace: Pacer | None = None,
    ) -> None:
        self._s3 = Connection(
            bucket=bucket,
            prefix=prefix,
            endpoint_url=endpoint_url,
            region=region,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            attempts=attempts,
            deadline_s=deadline_s,
            pace=pace or Pacer(),
        )
        self._chosen: DataPlane | None = None

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create a small object; False when the key exists."""
        tries = 0

        def put() -> bool:
            nonlocal tries
            tries += 1
            try:
                with self._s3.request(key):
                    self._s3.client().put_object(
                        Bucket=self._s3.bucket,
                        Key=self._s3.key(key),
                        Body=body,
                        ChecksumCRC64NVME=checksum.to_base64(checksum.crc64(body)),
                        IfNoneMatch="*",
                    )
            except KeyExists:
                # After a lost answer the key may hold our own put.
                return tries > 1 and self._get_once(key) == body
            return True

        return self._s3.retry(put)

    def upload(self, key: str, parts: Sequence[memoryview], crc64: int) -> Transfer:
        """Create an object from `parts`, verified against `crc64` here and by the server."""
        tally = Tally()
        total = sum(part.nbytes for part in parts)
        windows = split(parts, part_nbytes(total)) or [Window([])]
        try:
            if len(windows) > 1:
                whole = MultipartUpload(self._s3, self._plane(), key, tally)
                sent = self._s3.restart(lambda: self._in_parts(whole, key, windows, crc64))
                return tally.done(total if sent else 0, self._plane().name)
            if windows[0].crc64() != crc64:
                raise ObjectCorrupt(f"{key}: the bytes changed before they were uploaded")
            target, never = Target(key=self._s3.key(key)), threading.Event()
            Sender(self._s3, self._plane(), key, tally)(target, windows[0], crc64, never)
        except (KeyExists, ObjectMissing, UploadGone) as error:
            # The key is taken, or the answer to our own completion was lost and then repeated.
            if not self._holds(key, total, crc64):
                if isinstance(error, KeyExists):
                    raise ObjectConflict(f"{error}; it has other content") from error
                raise
        return tally.done(total, self._plane().name)

    def _in_parts(
        self, whole: MultipartUpload, key: str, windows: Sequence[Window], crc64: int
    ) -> bool:
        # It is there when an uploader was killed between this and telling of it, or when the
        # answer to our own completion was lost.
        if self._holds(key, sum(window.nbytes for window in windows), crc64):
            return False
        whole.run(windows, crc64)
        return True

    def _plane(self) -> DataPlane:
        if self._chosen is None:
            self._chosen = choose(self._s3)
        return self._chosen

    def get(self, key: str) -> bytes:
        """Return a small object."""
        return self._s3.retry(lambda: self._get_once(key))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` by one ranged GET."""
        flat = out.cast("B")
        if flat.nbytes:
            self.read_each(key, offset, [flat], lambda _: None)

    def read_each(
        self, key: str, offset: int, outs: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> None:
        """Fill one after the other by one ranged GET, and by others for what is lost of it."""
        self._s3.retry(Download(self._s3, key, offset, outs, arrived).once)

    def head(self, key: str) -> ObjectInfo | None:
        """Describe an object, with its CRC when the server kept one."""

        def head() -> ObjectInfo | None:
            try:
                with self._s3.request(key):
                    answer = self._s3.client().head_object(
                        Bucket=self._s3.bucket, Key=self._s3.key(key), ChecksumMode="ENABLED"
                    )
            except ObjectMissing:
                return None
            crc = answer.get("ChecksumCRC64NVME")
            return ObjectInfo(
                key=key,
                nbytes=answer["ContentLength"],
                crc64=checksum.from_base64(crc) if crc else None,
            )

        return self._s3.retry(head)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """Return all objects below a prefix."""
        found = [
            ObjectInfo(
                key=item["Key"].removeprefix(self._s3.prefix),
                nbytes=item["Size"],
                modified_at=item["LastModified"].timestamp(),
            )
            for page in pages(self._s3, prefix, OBJECTS)
            for item in page.get("Contents", [])
        ]
        return tuple(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is no error."""

        def delete() -> None:
            with suppress(ObjectMissing), self._s3.request(key):
                self._s3.client().delete_object(Bucket=self._s3.bucket, Key=self._s3.key(key))

        self._s3.retry(delete)

    def open_uploads(self, prefix: str) -> tuple[OpenUpload, ...]:
        """Return the open multipart uploads below a prefix."""
        found = [
            OpenUpload(
                key=item["Key"].removeprefix(self._s3.prefix),
                upload_id=item["UploadId"],
                started_at=item["Initiated"].timestamp(),
            )
            for page in pages(self._s3, prefix, UPLOADS)
            for item in page.get("Uploads", [])
        ]
        return tuple(sorted(found, key=lambda one: (one.key, one.upload_id)))

    def abort_upload(self, upload: OpenUpload) -> None:
        """Abort an open multipart upload; one that is gone is no error."""

        def abort() -> None:
            with suppress(UploadGone, ObjectMissing), self._s3.request(upload.key):
                self._s3.client().abort_multipart_upload(
                    Bucket=self._s3.bucket,
                    Key=self._s3.key(upload.key),
                    UploadId=upload.upload_id,
                )

        self._s3.retry(abort)

    def probe(self) -> None:
        """List, put, put again and delete one small object."""
        key = f"probe-{secrets.token_hex(8)}"
        self.list(key)
        try:
            if not self.put_if_absent(key, b"probe"):
                raise StoreUnavailable(f"{self._s3.where}: a fresh name was taken")
            # Other bytes: the same ones would be taken for our own after a lost answer.
            if self.put_if_absent(key, b"another"):
                raise ConditionalPutUnsupported(
                    f"{self._s3.where}: ignores If-None-Match, so two writers could both commit; "
                    "use a store with conditional puts"
                )
        finally:
            self.delete(key)

    def _get_once(self, key: str) -> bytes:
        with self._s3.request(key):
            answer = self._s3.client().get_object(Bucket=self._s3.bucket, Key=self._s3.key(key))
            with closing(answer["Body"]) as body:
                check_small(key, answer.get("ContentLength", 0))
                pieces, nbytes = [], 0
                while piece := body.read(_SIP):
                    nbytes += len(piece)
                    check_small(key, nbytes)
                    pieces.append(piece)
        return b"".join(pieces)

    def _holds(self, key: str, nbytes: int, crc64: int) -> bool:
        """Tell whether an existing object is the one wanted; read it if the server has no CRC."""
        info = self.head(key)
        if info is None or info.nbytes != nbytes:
            return False
        if info.crc64 is not None:
            return info.crc64 == crc64
        crc, block = 0, bytearray(min(_BLOCK, nbytes))
        for start in range(0, nbytes, _BLOCK):
            piece = memoryview(block)[: min(_BLOCK, nbytes - start)]
            self.read_into(key, start, piece)
            crc = checksum.crc64(piece, crc)
        return crc == crc64
