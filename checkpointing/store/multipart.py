"""A multipart upload: parallel parts, one CRC over the whole object, created or not at all."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from checkpointing.checksum import combine, to_base64
from checkpointing.errors import ObjectCorrupt, StoreError, StoreUnavailable
from checkpointing.store.data_plane import DataPlane, GaveUp, Sent, Target
from checkpointing.store.parts import Parts
from checkpointing.store.s3_client import THREADS, Connection
from checkpointing.store.s3_errors import UploadGone
from checkpointing.store.transfer import Tally
from checkpointing.store.window import Window

Part = dict[str, Any]
_MIN_PART: Final = 16 << 20
_MAX_PART: Final = 256 << 20
_MAX_PARTS: Final = 10_000


def part_nbytes(total: int) -> int:
    """Return the part size: about 64 parts, within 16 to 256 MiB, and never over 10,000 parts."""
    wanted = min(max(-(-total // 64), _MIN_PART), _MAX_PART)
    return max(wanted, -(-total // _MAX_PARTS))


class Sender:
    """Sends bodies until they arrive, fail for good, or are cancelled; the budget hears of it.

    Args:
        connection: To the store.
        plane: Sends one body once.
        key: Key of the object, relative to the store's prefix.
        tally: Counts what happens.
    """

    def __init__(self, connection: Connection, plane: DataPlane, key: str, tally: Tally) -> None:
        self._connection = connection
        self._plane = plane
        self._key = key
        self._tally = tally

    def __call__(
        self, target: Target, window: Window, crc: int, cancelled: threading.Event
    ) -> Sent:
        """Send one body."""
        pace = self._connection.pace

        def once() -> Sent:
            if cancelled.is_set():
                raise GaveUp(self._key)
            with (
                self._connection.request(self._key, self._tally),
                pace.transfer(window.nbytes) as sample,
            ):
                sent = self._plane.put(target, window, crc, cancelled)
                sample.held_back = sent.waited_s > 0
                return sent

        return self._connection.retry(once, patient=True)


class MultipartUpload:
    """One object that is sent in parts; whatever goes wrong, no open upload is left.

    Args:
        connection: To the store.
        plane: Sends the bodies.
        key: Key of the object, relative to the store's prefix.
        tally: Counts what happens.
    """

    def __init__(self, connection: Connection, plane: DataPlane, key: str, tally: Tally) -> None:
        self._connection = connection
        self._plane = plane
        self._key = key
        self._tally = tally
        self._creates = 0
        self._place: Any = {"Bucket": connection.bucket, "Key": connection.key(key)}

    def run(self, windows: Sequence[Window], crc: int) -> None:
        """Upload windows as parts.

        Raises:
            KeyExists: The key was taken before the upload was complete.
            UploadGone: Somebody aborted it, or a part of it is not there: begin it again.
            ObjectCorrupt: The parts together do not have this CRC.
        """
        self._abort_leftovers()
        creates = self._creates
        place = {**self._place, "UploadId": self._connection.retry(self._create, patient=True)}
        if self._creates > creates + 1:  # the answer that got lost may have been a success
            self._abort_leftovers(but=place["UploadId"])
        try:
            sent = self._send_all(place, windows)
            sizes = [window.nbytes for window in windows]
            if combine(zip((part_crc for part_crc, _ in sent), sizes, strict=True)) != crc:
                raise ObjectCorrupt(f"{self._key}: the bytes changed while they were uploaded")
            self._complete(place, [part for _, part in sent], crc, sum(sizes))
        except BaseException:
            with suppress(StoreError):
                self._connection.retry(lambda: self._abort(place))
            raise

    def _abort_leftovers(self, but: str = "") -> None:
        """Abort what a killed uploader left: the key belongs to one rank of one attempt."""
        with suppress(StoreError):
            with self._connection.request(self._key):
                listed = self._connection.client().list_multipart_uploads(
                    Bucket=self._place["Bucket"], Prefix=self._place["Key"]
                )
            for upload in listed.get("Uploads", []):
                if upload.get("Key") == self._place["Key"] and upload["UploadId"] != but:
                    self._abort({**self._place, "UploadId": upload["UploadId"]})

    def _abort(self, place: Any) -> None:
        with suppress(UploadGone), self._connection.request(self._key):
            self._connection.client().abort_multipart_upload(**place)

    def _create(self) -> str:
        self._creates += 1
        with self._connection.request(self._key, self._tally):
            answer = self._connection.client().create_multipart_upload(
                **self._place, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )
            return str(answer["UploadId"])

    def _send_all(self, place: Any, windows: Sequence[Window]) -> list[tuple[int, Part]]:
        send = Sender(self._connection, self._plane, self._key, self._tally)

        def send_part(index: int, cancelled: threading.Event) -> tuple[int, Part]:
            window = windows[index]
            crc = window.crc64()
            target = Target(key=place["Key"], upload_id=place["UploadId"], number=index + 1)
            sent = send(target, window, crc, cancelled)
            part = {"PartNumber": index + 1, "ETag": sent.etag, "ChecksumCRC64NVME": to_base64(crc)}
            return crc, part

        return Parts(
            len(windows),
            send_part,
            threads=THREADS,
            # Under a limit parts are late because of it, and a second sending has no room.
            may_hedge=lambda: not self._connection.pace.bound,
            hedged=self._tally.hedged,
        ).run()

    def _complete(self, place: Any, parts: list[Part], crc: int, nbytes: int) -> None:
        def complete() -> None:
            try:
                with self._connection.request(self._key, self._tally):
                    self._connection.client().complete_multipart_upload(
                        **place,
                        MultipartUpload={"Parts": parts},
                        ChecksumCRC64NVME=to_base64(crc),
                        ChecksumType="FULL_OBJECT",
                        MpuObjectSize=nbytes,
                        IfNoneMatch="*",
                    )
            except StoreUnavailable as error:
                if error.code == "ConditionalRequestConflict":  # this upload cannot complete now
                    raise UploadGone(str(error)) from error
                raise

        self._connection.retry(complete, patient=True)
