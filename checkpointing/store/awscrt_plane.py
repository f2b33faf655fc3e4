"""Bodies through the native S3 client of awscrt.

It sends and signs without the interpreter, but cannot send a stretch of a file: every part is read
into a buffer of its own first, so the parts in flight are bounded by their bytes.
"""

import re
import threading
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final
from urllib.parse import quote, urlsplit

import boto3
import botocore.session
from awscrt.auth import AwsCredentials, AwsCredentialsProvider
from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import (
    ClientBootstrap,
    ClientTlsContext,
    DefaultHostResolver,
    EventLoopGroup,
    TlsContextOptions,
)
from awscrt.s3 import (
    S3Client,
    S3RequestTlsMode,
    S3RequestType,
    S3ResponseError,
    S3RetryConfig,
    S3RetryMode,
    create_default_s3_signing_config,
)
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError

from checkpointing.checksum import to_base64
from checkpointing.store.data_plane import GaveUp, Sent, Target
from checkpointing.store.s3_client import THREADS, Connection
from checkpointing.store.window import Body, Window

_BUFFERS: Final = 64 << 20
_MEMORY_LIMIT: Final = 1 << 30  # the least that the client accepts; it takes what is in flight only
_SLOWEST_BYTES_PER_S: Final = 256 << 10
_POLL_S: Final = 0.2
_WORDS: Final = {
    "AWS_ERROR_S3_SLOW_DOWN": ("SlowDown", 503),
    "AWS_ERROR_S3_INTERNAL_ERROR": ("InternalError", 500),
    "AWS_ERROR_S3_REQUEST_TIMEOUT": ("RequestTimeout", 400),
    "AWS_ERROR_S3_REQUEST_TIME_TOO_SKEWED": ("RequestTimeTooSkewed", 403),
}


class AwscrtPlane:
    """See `DataPlane`."""

    name = "awscrt"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._client: Any = None
        self._room = _Room(_BUFFERS)
        connection.on_expiry(self._forget)

    def put(self, target: Target, window: Window, crc: int, cancelled: threading.Event) -> Sent:
        """Send one body."""
        with self._room.taken(window.nbytes):
            # All of it at once: what the client does with a buffer cannot be held back any more.
            waited_s = self._connection.pace.nbytes(window.nbytes) if window.nbytes else 0.0
            if cancelled.is_set():
                raise GaveUp(target.key)
            return Sent(etag=self._request(target, window, crc, cancelled), waited_s=waited_s)

    def _request(self, target: Target, window: Window, crc: int, cancelled: threading.Event) -> str:
        url, path = self._place(target)
        headers = [
            ("Host", url.netloc),
            ("Content-Length", str(window.nbytes)),
            ("x-amz-checksum-crc64nvme", to_base64(crc)),
        ]
        if target.upload_id is None:
            headers.append(("If-None-Match", "*"))
        got: dict[str, str] = {}

        def on_headers(headers: list[tuple[str, str]], **_: object) -> None:
            got.update({name.lower(): value for name, value in headers})

        operation = "PutObject" if target.upload_id is None else "UploadPart"
        body = Body(window)
        request = self._native().make_request(
            type=S3RequestType.DEFAULT,
            operation_name=operation,
            request=HttpRequest("PUT", path, HttpHeaders(headers), body),
            on_headers=on_headers,
        )
        self._wait(request, target, window, cancelled)
        return got.get("etag", "")

    def _wait(
        self, request: Any, target: Target, window: Window, cancelled: threading.Event
    ) -> None:
        left = self._connection.read_timeout_s + window.nbytes / _SLOWEST_BYTES_PER_S
        while True:
            try:
                request.finished_future.result(_POLL_S)
            except FutureTimeout:
                left -= _POLL_S
                if not cancelled.is_set() and left > 0:
                    continue
                request.cancel()
                if cancelled.is_set():
                    raise GaveUp(target.key) from None
                raise ReadTimeoutError(endpoint_url=self._connection.where) from None
            except CancelledError:
                raise GaveUp(target.key) from None
            except S3ResponseError as error:
                raise _client_error(error) from error
            except AwsCrtError as error:
                if cancelled.is_set():
                    raise GaveUp(target.key) from None
                raise (_known(error) or error) from error
            return

    def _place(self, target: Target) -> tuple[Any, str]:
        url = urlsplit(str(self._connection.client().meta.endpoint_url))
        bucket, key = self._connection.bucket, quote(target.key, safe="/~")
        if self._connection.path_style or "." in bucket:
            path = f"{url.path.rstrip('/')}/{bucket}/{key}"
        else:
            path, url = f"/{key}", url._replace(netloc=f"{bucket}.{url.netloc}")
        if target.upload_id is not None:
            path += f"?partNumber={target.number}&uploadId={quote(target.upload_id, safe='')}"
        return url, path

    def _native(self) -> Any:
        """Return the client, made on first use: it does not survive a fork."""
        control = self._connection.client()
        with self._lock:
            if self._client is None:
                secure = str(control.meta.endpoint_url).startswith("https:")
                tls = _tls() if secure else None
                loops = EventLoopGroup(1)
                region = str(control.meta.region_name)
                self._client = S3Client(
                    bootstrap=ClientBootstrap(loops, DefaultHostResolver(loops)),
                    region=region,
                    tls_mode=S3RequestTlsMode.ENABLED if secure else S3RequestTlsMode.DISABLED,
                    tls_connection_options=tls,
                    signing_config=create_default_s3_signing_config(
                        region=region, credential_provider=_provider()
                    ),
                    retry_config=S3RetryConfig(retry_mode=S3RetryMode.NONE),
                    connect_timeout_ms=int(1000 * self._connection.connect_timeout_s),
                    memory_limit=_MEMORY_LIMIT,
                    max_active_connections_override=THREADS,
                )
            return self._client

    def _forget(self) -> None:
        with self._lock:
            self._client = None


class _Room:
    """Lets bodies in while their buffers fit; one that never fits goes alone."""

    def __init__(self, nbytes: int) -> None:
        self._left = self._all = nbytes
        self._changed = threading.Condition()

    def taken(self, nbytes: int) -> "_Taken":
        return _Taken(self, min(nbytes, self._all))

    def take(self, nbytes: int) -> None:
        with self._changed:
            while self._left < nbytes:
                self._changed.wait()
            self._left -= nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._left += nbytes
            self._changed.notify_all()


class _Taken:
    def __init__(self, room: _Room, nbytes: int) -> None:
        self._room = room
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._room.take(self._nbytes)

    def __exit__(self, *_: object) -> None:
        self._room.give(self._nbytes)


def _tls() -> Any:
    """Return the TLS of a client; it trusts the same certificates as boto3."""
    options = TlsContextOptions()
    if bundle := botocore.session.Session().get_config_variable("ca_bundle"):
        options.override_default_trust_store_from_path(None, str(bundle))
    return ClientTlsContext(options).new_connection_options()


def _provider() -> Any:
    """Return credentials of the same chain as boto3's, looked up whenever something is signed."""
    credentials = boto3.session.Session().get_credentials()
    if credentials is None:
        raise NoCredentialsError

    def current() -> Any:
        frozen = credentials.get_frozen_credentials()
        return AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)

    return AwsCredentialsProvider.new_delegate(current)


def _known(error: Any) -> ClientError | None:
    """Return the store's word for what the client calls by a name of its own, without headers."""
    if error.name not in _WORDS:
        return None
    code, status = _WORDS[error.name]
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def _client_error(error: Any) -> ClientError:
    """Return an answer of the store in the form of botocore, so that both are judged alike."""
    text = (error.body or b"").decode(errors="replace")
    found = {
        name: match[1] if (match := re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)) else ""
        for name in ("Code", "Message", "RequestId")
    }
    headers = {name.lower(): value for name, value in error.headers or ()}
    response: Any = {
        "Error": {"Code": found["Code"], "Message": found["Message"]},
        "ResponseMetadata": {
            "HTTPStatusCode": error.status_code or 0,
            "RequestId": found["RequestId"] or headers.get("x-amz-request-id", ""),
            "HTTPHeaders": headers,
        },
    }
    return ClientError(response, error.operation_name or "")
