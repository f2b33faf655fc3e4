"""What S3 clients see when answers get lost, credentials run out or parts vanish."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from checkpointing.checksum import crc64
from checkpointing.errors import ObjectConflict, StoreDenied, StoreUnavailable
from checkpointing.store.s3 import S3Store
from deploy.demo.s3_server import S3Server

pytestmark = pytest.mark.s3
MIB = 1 << 20


class Faulty:
    """A client whose calls of one operation go wrong a number of times."""

    def __init__(
        self, client: Any, operation: str, fault: Callable[[Any], Any], times: int
    ) -> None:
        self._client = client
        self._operation = operation
        self._fault = fault
        self.left = times

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if name != self._operation:
            return real

        def call(**arguments: Any) -> Any:
            if self.left <= 0:
                return real(**arguments)
            self.left -= 1
            return self._fault(lambda: real(**arguments))

        return call


def _lost(call: Callable[[], Any]) -> Any:
    call()
    raise ReadTimeoutError(endpoint_url="x")


def _answer(code: str, status: int) -> Callable[[Any], Any]:
    def fault(_: Callable[[], Any]) -> Any:
        response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(response, "X")  # type: ignore[arg-type]

    return fault


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    prefix = f"{secrets.token_hex(4)}/"
    return S3Store(
        bucket=s3_server.bucket, prefix=prefix, endpoint_url=s3_server.url, region="us-east-1"
    )


def _break(store: S3Store, operation: str, fault: Callable[[Any], Any], times: int = 1) -> Faulty:
    """Let calls go wrong: those that carry parts go through a client of their own."""
    if operation == "upload_part":
        store._s3._cached_data = faulty = Faulty(store._s3.data_client(), operation, fault, times)
    else:
        store._s3._cached = faulty = Faulty(store._s3.client(), operation, fault, times)
    return faulty


def _open_uploads(store: S3Store) -> list[str]:
    client = store._s3.client()
    listed = client.list_multipart_uploads(Bucket=store._s3.bucket, Prefix=store._s3.prefix)
    return [upload["Key"] for upload in listed.get("Uploads", [])]


def test_our_own_put_whose_answer_was_lost_is_ours(store: S3Store) -> None:
    _break(store, "put_object", _lost)
    assert store.put_if_absent("a", b"mine")
    assert store.get("a") == b"mine"


def test_anothers_put_is_not_ours_even_after_a_lost_answer(store: S3Store) -> None:
    assert store.put_if_absent("a", b"theirs")

    def refused(_: Callable[[], Any]) -> Any:
        raise EndpointConnectionError(endpoint_url="x")

    _break(store, "put_object", refused)
    assert not store.put_if_absent("a", b"mine")


@pytest.mark.parametrize("operation", ["upload_part", "create_multipart_upload"])
@pytest.mark.parametrize("fault", [_lost, _answer("SlowDown", 503), _answer("InternalError", 500)])
def test_parts_are_sent_again(store: S3Store, operation: str, fault: Callable[[Any], Any]) -> None:
    body = secrets.token_bytes(33 * MIB)
    _break(store, operation, fault, times=2)
    store.upload("big", [memoryview(body)], crc64(body))
    out = bytearray(len(body))
    store.read_into("big", 0, memoryview(out))
    assert out == body


def test_a_lost_answer_to_the_completion_is_a_success(store: S3Store) -> None:
    body = secrets.token_bytes(20 * MIB)
    _break(store, "complete_multipart_upload", _lost)
    store.upload("big", [memoryview(body)], crc64(body))
    info = store.head("big")
    assert info is not None
    assert info.crc64 == crc64(body)


def test_an_upload_that_was_aborted_by_others_begins_again(store: S3Store) -> None:
    body = secrets.token_bytes(20 * MIB)
    faulty = _break(store, "upload_part", _answer("NoSuchUpload", 404))
    store.upload("big", [memoryview(body)], crc64(body))
    assert faulty.left == 0


def test_a_failed_or_refused_upload_leaves_no_open_multipart(store: S3Store) -> None:
    body = secrets.token_bytes(20 * MIB)
    _break(store, "upload_part", _answer("AccessDenied", 403))
    with pytest.raises(StoreDenied):
        store.upload("big", [memoryview(body)], crc64(body))
    assert _open_uploads(store) == []
    store.upload("big", [memoryview(body)], crc64(body))
    other = secrets.token_bytes(20 * MIB)
    with pytest.raises(ObjectConflict):
        store.upload("big", [memoryview(other)], crc64(other))
    assert _open_uploads(store) == []


def test_what_a_killed_uploader_left_open_is_aborted_by_the_next(store: S3Store) -> None:
    store._s3.client().create_multipart_upload(
        Bucket=store._s3.bucket, Key=store._s3.key("big"), ChecksumAlgorithm="CRC64NVME"
    )
    assert len(_open_uploads(store)) == 1
    body = secrets.token_bytes(20 * MIB)
    store.upload("big", [memoryview(body)], crc64(body))
    assert _open_uploads(store) == []


def test_an_expired_token_is_renewed(store: S3Store) -> None:
    faulty = _break(store, "put_object", _answer("ExpiredToken", 400))
    assert store.put_if_absent("a", b"1")
    assert store._s3.client() is not faulty, "a new client asks for new credentials"


def test_a_skewed_clock_and_a_conflict_in_flight_are_tried_again(store: S3Store) -> None:
    _break(store, "put_object", _answer("RequestTimeTooSkewed", 403))
    assert store.put_if_absent("a", b"1")
    _break(store, "put_object", _answer("ConditionalRequestConflict", 409))
    assert store.put_if_absent("b", b"1")


def test_retries_are_bounded(s3_server: S3Server) -> None:
    store = S3Store(bucket="b-b-b", endpoint_url=s3_server.url, region="us-east-1", attempts=3)
    faulty = _break(store, "list_objects_v2", _answer("SlowDown", 503), times=99)
    with pytest.raises(StoreUnavailable):
        store.list("")
    assert faulty.left == 96


def test_wrong_credentials_are_denied_in_one_line_with_the_fix(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in ("wrong", ""):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key if secret else "")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        if not secret:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
            monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        store = S3Store(bucket=s3_server.bucket, endpoint_url=s3_server.url, region="us-east-1")
        with pytest.raises(StoreDenied, match="check the credentials") as caught:
            store.probe()
        assert "\n" not in str(caught.value)
        assert s3_server.bucket in str(caught.value)
