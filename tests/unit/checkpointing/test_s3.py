from typing import Any

import pytest

from checkpointing.errors import StoreUnavailable
from checkpointing.store.s3 import S3Store


class Pages:
    """A client that answers every list request with the next page."""

    def __init__(self, *pages: dict[str, Any]) -> None:
        self.pages = list(pages)

    def list_objects_v2(self, **_: Any) -> dict[str, Any]:
        return self.pages.pop(0)


def _page(*names: str, **more: Any) -> dict[str, Any]:
    return {"Contents": [{"Key": name, "Size": 1} for name in names], **more}


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
