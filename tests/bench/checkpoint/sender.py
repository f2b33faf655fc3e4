"""boto3 alone: `python -m tests.bench.checkpoint.sender ENDPOINT BUCKET`; see `children.serve`.

Its ways to put the same files: `multipart` as boto3 comes, `lean` without hashing the body for the
signature and without a checksum, `put` in one request per file.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from tests.bench.checkpoint.children import serve

REGION = "us-east-1"


class Sender:
    """Clients that are warm after the first put."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self._bucket = bucket
        path: Any = {"addressing_style": "path"}
        common: dict[str, Any] = {"endpoint_url": endpoint, "region_name": REGION}
        self._plain = boto3.client("s3", **common, config=Config(s3=path, max_pool_connections=32))
        lean = Config(
            s3={**path, "payload_signing_enabled": False},
            max_pool_connections=32,
            request_checksum_calculation="when_required",
        )
        self._lean = boto3.client("s3", **common, config=lean)

    def put(self, how: str, files: dict[str, str], part: int, threads: int) -> dict[str, float]:
        """Put all files at once.

        Args:
            how: One of the ways above.
            files: Paths by key.
            part: Bytes of a part.
            threads: Parts in flight of one file.
        """
        one: Callable[[str, str], None] = self._put
        if how != "put":
            client = self._lean if how == "lean" else self._plain
            parts = TransferConfig(
                multipart_threshold=part, multipart_chunksize=part, max_concurrency=threads
            )

            def one(key: str, path: str) -> None:
                client.upload_file(path, self._bucket, key, Config=parts)

        begun, used = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(one, files.keys(), files.values()))
        return {"s": time.perf_counter() - begun, "cpu_s": time.process_time() - used}

    def _put(self, key: str, path: str) -> None:
        with Path(path).open("rb") as body:
            self._plain.put_object(Bucket=self._bucket, Key=key, Body=body)


def main() -> None:
    serve({"put": Sender(*sys.argv[1:3]).put})


if __name__ == "__main__":
    main()
