"""A connection to one prefix of one bucket: client, errors and retries.

botocore's own retries are off. It repeats a conditional put whose answer was lost and then reports
the conflict with itself, and it does not repeat expired tokens or skewed clocks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from checkpointing.errors import StoreError, StoreUnavailable
from checkpointing.store.base import check_key
from checkpointing.store.s3_errors import CredentialsExpired, translate

S3Client = Any  # boto3 makes its classes at run time
THREADS: Final = 8
_DEADLINE_S: Final = 120.0
_Answer = TypeVar("_Answer")


class Connection:
    """See `S3Store` for the arguments."""

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str,
        endpoint_url: str | None,
        region: str | None,
        connect_timeout_s: float,
        read_timeout_s: float,
        attempts: int,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.where = f"s3://{bucket}" + (f" at {endpoint_url}" if endpoint_url else "")
        self._endpoint_url = endpoint_url
        self._region = region
        self._attempts = attempts
        self._config = Config(
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=4 * THREADS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if endpoint_url else {},
        )
        self._lock = threading.Lock()
        self._cached: S3Client | None = None

    def client(self) -> S3Client:
        """Return the client, made on first use: native parts of it do not survive a fork."""
        with self._lock:
            if self._cached is None:
                with self._translated():
                    # A session of our own, so that new credentials are looked for from scratch.
                    self._cached = boto3.session.Session().client(
                        "s3",
                        endpoint_url=self._endpoint_url,
                        region_name=self._region,
                        config=self._config,
                    )
            return self._cached

    def key(self, key: str) -> str:
        """Return the full key."""
        return self.prefix + check_key(key)

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Raise our errors for botocore's; forget the client when its credentials ran out."""
        try:
            with self._translated(key):
                yield
        except CredentialsExpired:
            with self._lock:
                self._cached = None
            raise

    def retry(
        self, action: Callable[[], _Answer], only: type[StoreError] = StoreUnavailable
    ) -> _Answer:
        """Do something until it succeeds, fails for good, or its tries or time are used up."""
        return Retrying(
            stop=stop_after_attempt(self._attempts) | stop_after_delay(_DEADLINE_S),
            wait=wait_random_exponential(multiplier=0.1, max=10),
            retry=retry_if_exception_type(only),
            reraise=True,
        )(action)

    @contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise translate(error, f"{self.where}: {key}" if key else self.where) from error
        except ValueError as error:  # botocore's word for an endpoint that is no URL
            raise StoreError(f"{self.where}: {error}") from error
