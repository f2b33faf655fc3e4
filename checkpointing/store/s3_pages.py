"""Long answers of S3, page by page: a list that breaks off is an error, never a short list."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from checkpointing.errors import StoreUnavailable
from checkpointing.store.s3_client import Connection

Markers = Mapping[str, str]
OBJECTS: Final[tuple[str, Markers]] = (
    "list_objects_v2",
    {"ContinuationToken": "NextContinuationToken"},
)
UPLOADS: Final[tuple[str, Markers]] = (
    "list_multipart_uploads",
    {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
)


def pages(
    connection: Connection, prefix: str, what: tuple[str, Markers]
) -> Iterator[dict[str, Any]]:
    """Yield the pages of what is below a prefix.

    Args:
        connection: To the store.
        prefix: Relative to the store's prefix.
        what: `OBJECTS` or `UPLOADS`.

    Raises:
        StoreUnavailable: The server did not answer, or broke off.
    """
    operation, markers = what
    more: dict[str, str] = {}

    def ask() -> dict[str, Any]:
        with connection.request(prefix):
            answer = getattr(connection.client(), operation)(
                Bucket=connection.bucket, Prefix=connection.prefix + prefix, **more
            )
            return cast(dict[str, Any], answer)

    while True:
        page = connection.retry(ask)
        yield page
        if not page.get("IsTruncated"):
            return
        before = more
        more = {ours: page[theirs] for ours, theirs in markers.items() if page.get(theirs)}
        if not more or more == before:
            raise StoreUnavailable(f"{connection.where}: broke off the list of {prefix}")
