import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.response import StreamingBody
from urllib3.exceptions import ProtocolError

from checkpointing.errors import ObjectCorrupt, StoreUnavailable
from checkpointing.store.s3 import S3Store

THEN = datetime.fromtimestamp(0, UTC)


class Pages:
    """A client that answers every list request with the next page."""

    def __init__(self, *pages: dict[str, Any]) -> None:
        self.pages = list(pages)

    def list_objects_v2(self, **_: Any) -> dict[str, Any]:
        return self.pages.pop(0)


def _page(*names: str, **more: Any) -> dict[str, Any]:
    return {"Contents": [{"Key": name, "Size": 1, "LastModified": THEN} for name in names], **more}


def _store(client: Any) -> S3Store:
    store = S3Store(bucket="b", endpoint_url="http://127.0.0.1:9", region="us-east-1")
    store._s3._cached = client
    return store


def test_all_pages_of_a_list_are_read() -> None:
    more = {"IsTruncated": True}
    store = _store(
        Pages(
            _page("a", NextContinuationToken="1", **more),
            _page("b", NextContinuationToken="2", **more),
            _page("c", IsTruncated=False),
        )
    )
    assert [info.key for info in store.list("")] == ["a", "b", "c"]


@pytest.mark.parametrize("tokens", [[None], ["1", "1"]])
def test_a_list_that_breaks_off_is_no_answer(tokens: list[str | None]) -> None:
    pages = [_page("a", IsTruncated=True, NextContinuationToken=token) for token in tokens]
    with pytest.raises(StoreUnavailable, match="broke off the list"):
        _store(Pages(*pages)).list("")


class Reset(io.BytesIO):
    """A stream whose connection is reset at its end."""

    def read(self, size: int | None = -1) -> bytes:
        raise ProtocolError("connection reset")

    def readinto(self, out: Any) -> int:
        raise ProtocolError("connection reset")


class Bodies:
    """A client that answers every get with the next body."""

    def __init__(self, *bodies: StreamingBody) -> None:
        self.bodies = list(bodies)

    def get_object(self, **_: Any) -> dict[str, Any]:
        return {"Body": self.bodies.pop(0)}


@pytest.mark.parametrize("broken", [lambda: io.BytesIO(b"x" * 400), Reset])
def test_a_body_whose_connection_was_lost_is_read_again(broken: Callable[[], io.BytesIO]) -> None:
    def client() -> Bodies:
        whole = io.BytesIO(b"y" * 1000)
        return Bodies(StreamingBody(broken(), 1000), StreamingBody(whole, 1000))

    assert _store(client()).get("k") == b"y" * 1000
    out = bytearray(1000)
    _store(client()).read_into("k", 0, memoryview(out))
    assert out == b"y" * 1000


def test_an_object_that_is_shorter_than_promised_is_corrupt() -> None:
    short = StreamingBody(io.BytesIO(b"x" * 400), 400)
    with pytest.raises(ObjectCorrupt, match="ends at byte 400"):
        _store(Bodies(short)).read_into("k", 0, memoryview(bytearray(1000)))
