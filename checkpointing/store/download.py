"""Bytes of an S3 object on their way into memory."""

from collections.abc import Callable, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, Final

from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

from checkpointing.errors import ObjectCorrupt
from checkpointing.store.s3_client import Connection

_SIP: Final = 1 << 20  # urllib3 reads through a buffer: twice as fast when that stays in the cache


class Download:
    """Fills pieces of memory with neighbouring bytes; what has arrived is not asked for again.

    Args:
        connection: To the store.
        key: Key of the object, relative to the store's prefix.
        offset: Of the first byte.
        outs: The memory, none of it empty.
        arrived: Called with the number of each piece, in order, once it is full.
    """

    def __init__(
        self,
        connection: Connection,
        key: str,
        offset: int,
        outs: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._key = key
        self._offset = offset
        self._outs = outs
        self._arrived = arrived
        self._next = 0

    def once(self) -> None:
        """Ask for everything that is missing, by one request."""
        missing = self._outs[self._next :]
        last = self._offset + sum(out.nbytes for out in missing) - 1
        with self._connection.request(self._key):
            answer = self._connection.client().get_object(
                Bucket=self._connection.bucket,
                Key=self._connection.key(self._key),
                Range=f"bytes={self._offset}-{last}",
            )
            # Not `with body`, which gives the raw stream: that does not notice a lost connection.
            with closing(answer["Body"]) as body:
                stream = _Stream(body)
                for out in missing:
                    self._fill(stream, out)
                    self._arrived(self._next)
                    self._next += 1
                    self._offset += out.nbytes

    def _fill(self, stream: "_Stream", out: memoryview) -> None:
        done = 0
        while done < out.nbytes and (count := stream.readinto(out[done:])):
            done += count
        if done < out.nbytes:
            where = f"{self._connection.where}: {self._key}"
            raise ObjectCorrupt(f"{where} ends at byte {self._offset + done}")


class _Stream:
    """The body of an answer; as the socket gives it where that can be reached, without copies."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._raw = getattr(body, "_raw_stream", None)
        http = getattr(self._raw, "_fp", None)
        is_plain = isinstance(http, HTTPResponse) and not http.chunked and http.length is not None
        self._http: HTTPResponse | None = http if is_plain else None

    def readinto(self, out: memoryview) -> int:
        """Return how many bytes came, 0 at the end.

        Raises:
            BotoCoreError: The connection was lost.
        """
        if self._http is None:
            return int(self._body.readinto(out[:_SIP]))
        expected = self._http.length or 0
        try:
            count = self._http.readinto(out)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url="", error=error) from error
        except (OSError, HTTPException) as error:
            raise ResponseStreamingError(error=error) from error
        if not count and expected:
            raise IncompleteReadError(actual_bytes=0, expected_bytes=expected)
        if self._http.isclosed() and self._raw is not None:
            self._raw.release_conn()  # for the next request
        return count
