"""Bodies through boto3: read by the socket straight from the arena."""

import threading
from typing import Any

from botocore.exceptions import BotoCoreError

from checkpointing.checksum import to_base64
from checkpointing.store.data_plane import GaveUp, Sent, Target
from checkpointing.store.s3_client import Connection
from checkpointing.store.window import Body, Window


class Boto3Plane:
    """See `DataPlane`."""

    name = "boto3"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, target: Target, window: Window, crc: int, cancelled: threading.Event) -> Sent:
        """Send one body."""
        body = Body(window, self._connection.pace, cancelled)
        common: dict[str, Any] = {
            "Bucket": self._connection.bucket,
            "Key": target.key,
            "Body": body if window.nbytes else b"",
            "ChecksumCRC64NVME": to_base64(crc),
        }
        client = self._connection.data_client()
        try:
            if target.upload_id is None:
                answer = client.put_object(**common, IfNoneMatch="*")
            else:
                answer = client.upload_part(
                    **common, UploadId=target.upload_id, PartNumber=target.number
                )
        except BotoCoreError as error:
            if cancelled.is_set():
                raise GaveUp(target.key) from error
            raise
        return Sent(etag=str(answer["ETag"]), waited_s=body.waited_s)
