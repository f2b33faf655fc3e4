"""A multipart upload: parallel parts, one CRC over the whole object, created or not at all."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from checkpointing.checksum import combine, crc64, to_base64
from checkpointing.errors import ObjectCorrupt, StoreError
from checkpointing.store.s3_client import THREADS, Connection
from checkpointing.store.window import Window

Part = dict[str, Any]
_MIN_PART: Final = 16 << 20
_MAX_PART: Final = 256 << 20
_MAX_PARTS: Final = 10_000


class _GaveUp(StoreError):
    """This part was not sent because another one failed."""


def part_nbytes(total: int) -> int:
    """Return the part size: about 64 parts, within 16 to 256 MiB, and never over 10,000 parts."""
    wanted = min(max(-(-total // 64), _MIN_PART), _MAX_PART)
    return max(wanted, -(-total // _MAX_PARTS))


def crc_of(window: Window) -> int:
    """Return the CRC64NVME of a window."""
    crc = 0
    for piece in window.pieces:
        crc = crc64(piece, crc)
    return crc


def upload_parts(connection: Connection, key: str, windows: Sequence[Window], crc: int) -> None:
    """Upload windows as parts; whatever goes wrong, no open upload is left.

    Raises:
        KeyExists: The key was taken before the upload was complete.
        UploadGone: Somebody aborted it; begin again.
        ObjectCorrupt: The parts together do not have this CRC.
    """
    place: Any = {"Bucket": connection.bucket, "Key": connection.key(key)}
    _abort_leftovers(connection, key, place)

    def create() -> str:
        with connection.errors(key):
            answer = connection.client().create_multipart_upload(
                **place, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )
            return str(answer["UploadId"])

    place = {**place, "UploadId": connection.retry(create)}
    try:
        sent = _send_all(connection, key, place, windows)
        sizes = [window.nbytes for window in windows]
        if combine(zip((part_crc for part_crc, _ in sent), sizes, strict=True)) != crc:
            raise ObjectCorrupt(f"{key}: the bytes changed while they were uploaded")
        _complete(connection, key, place, [part for _, part in sent], crc, sum(sizes))
    except BaseException:
        with suppress(StoreError), connection.errors(key):
            connection.client().abort_multipart_upload(**place)
        raise


def _abort_leftovers(connection: Connection, key: str, place: Any) -> None:
    """Abort what a killed uploader left: the key belongs to one rank of one attempt."""
    with suppress(StoreError), connection.errors(key):
        listed = connection.client().list_multipart_uploads(
            Bucket=place["Bucket"], Prefix=place["Key"]
        )
        for upload in listed.get("Uploads", []):
            if upload.get("Key") == place["Key"]:
                connection.client().abort_multipart_upload(**place, UploadId=upload["UploadId"])


def _send_all(
    connection: Connection, key: str, place: Any, windows: Sequence[Window]
) -> list[tuple[int, Part]]:
    failed = threading.Event()

    def send(number: int, window: Window) -> tuple[int, Part]:
        if failed.is_set():
            raise _GaveUp(key)
        crc = crc_of(window)
        try:
            etag = connection.retry(lambda: _send(connection, key, place, number, window, crc))
        except BaseException:
            failed.set()
            raise
        return crc, {"PartNumber": number, "ETag": etag, "ChecksumCRC64NVME": to_base64(crc)}

    with ThreadPoolExecutor(THREADS, thread_name_prefix="part") as pool:
        futures = [pool.submit(send, at, window) for at, window in enumerate(windows, start=1)]
    _raise_cause(futures)
    return [future.result() for future in futures]


def _raise_cause(futures: Sequence[Future[tuple[int, Part]]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, _GaveUp)):
        raise error


def _send(
    connection: Connection, key: str, place: Any, number: int, window: Window, crc: int
) -> str:
    window.seek(0)
    with connection.errors(key):
        answer = connection.client().upload_part(
            **place, PartNumber=number, Body=window, ChecksumCRC64NVME=to_base64(crc)
        )
        return str(answer["ETag"])


def _complete(
    connection: Connection,
    key: str,
    place: Any,
    parts: list[Part],
    crc: int,
    nbytes: int,
) -> None:
    def complete() -> None:
        with connection.errors(key):
            connection.client().complete_multipart_upload(
                **place,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=to_base64(crc),
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=nbytes,
                IfNoneMatch="*",
            )

    connection.retry(complete)
