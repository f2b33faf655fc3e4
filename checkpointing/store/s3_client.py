"""A connection to one prefix of one bucket: clients, errors and retries.

botocore's own retries are off. It repeats a conditional put whose answer was lost and then reports
the conflict with itself, and it does not repeat expired tokens or skewed clocks.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import boto3
from awscrt.exceptions import AwsCrtError
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    stop_any,
    wait_random_exponential,
)

from checkpointing.errors import StoreError, StoreThrottled, StoreUnavailable
from checkpointing.store.base import check_key
from checkpointing.store.pace import Pacer
from checkpointing.store.s3_errors import ClockSkewed, CredentialsExpired, UploadGone, translate
from checkpointing.store.transfer import Tally

S3Client = Any  # boto3 makes its classes at run time
THREADS: Final = 8
_LONGEST_WAIT_S: Final = 10.0
_SAME_WORD: Final = 3  # an expired token or a wrong clock that stays so is not waited for
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


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
        deadline_s: float,
        pace: Pacer,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.where = f"s3://{bucket}" + (f" at {endpoint_url}" if endpoint_url else "")
        self.pace = pace
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.path_style = endpoint_url is not None
        self._endpoint_url = endpoint_url
        self._region = region
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._cached: S3Client | None = None
        self._cached_data: S3Client | None = None
        self._generation = 0
        self._forgotten: list[Callable[[], None]] = []

    def client(self) -> S3Client:
        """Return the client, made on first use: native parts of it do not survive a fork."""
        with self._lock:
            if self._cached is None:
                self._cached = self._new_client(self._config())
            return self._cached

    def data_client(self) -> S3Client:
        """Return the client for bodies that carry a CRC64NVME: those are not hashed a second time.

        The header with the CRC is part of what is signed, and the server refuses other bytes.
        """
        with self._lock:
            if self._cached_data is None:
                self._cached_data = self._new_client(self._config(payload_signing_enabled=False))
            return self._cached_data

    def key(self, key: str) -> str:
        """Return the full key."""
        return self.prefix + check_key(key)

    def on_expiry(self, forget: Callable[[], None]) -> None:
        """Call this whenever credentials ran out."""
        self._forgotten.append(forget)

    @contextmanager
    def request(self, key: str, tally: Tally | None = None) -> Iterator[None]:
        """Wait for leave to make one request, and raise our errors for those of the clients."""
        self.pace.request()
        generation = self._generation
        try:
            with self._translated(key):
                yield
        except StoreUnavailable as error:
            self._heed(error, generation)
            if tally is not None:
                tally.retried(error.code)
            raise

    def retry(self, action: Callable[[], _Answer], *, patient: bool = False) -> _Answer:
        """Do something until it succeeds, fails for good, or its tries or time are used up.

        Args:
            action: One request.
            patient: Go on until the deadline, however many tries that takes.
        """
        stops: list[Any] = [stop_after_delay(self._deadline_s), _Stubborn()]
        if not patient:
            stops.append(stop_after_attempt(self._attempts))
        return Retrying(
            stop=stop_any(*stops),
            wait=wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
            retry=retry_if_exception(_worth_repeating),
            reraise=True,
        )(action)

    def restart(self, action: Callable[[], _Answer]) -> _Answer:
        """Do a whole upload, and again when it was aborted by others."""
        return Retrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: isinstance(error, UploadGone)),
            reraise=True,
        )(action)

    def _heed(self, error: StoreUnavailable, generation: int) -> None:
        if isinstance(error, StoreThrottled):
            self.pace.throttled()
        elif isinstance(error, CredentialsExpired):
            with self._lock:
                if generation != self._generation:  # others in flight had the same old ones
                    return
                self._generation += 1
                self._cached = self._cached_data = None
            _log.warning("%s", error)
            for forget in self._forgotten:
                forget()
        elif isinstance(error, ClockSkewed):
            _log.warning("%s", error)
        elif not isinstance(error, UploadGone):
            self.pace.late()

    def _config(self, **more: Any) -> Config:
        s3: Any = {**({"addressing_style": "path"} if self.path_style else {}), **more}
        return Config(
            connect_timeout=self.connect_timeout_s,
            read_timeout=self.read_timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=4 * THREADS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3=s3,
        )

    def _new_client(self, config: Config) -> S3Client:
        with self._translated():
            # A session of our own, so that new credentials are looked for from scratch.
            return boto3.session.Session().client(
                "s3", endpoint_url=self._endpoint_url, region_name=self._region, config=config
            )

    @contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, AwsCrtError) as error:
            raise translate(error, f"{self.where}: {key}" if key else self.where) from error
        except ValueError as error:  # botocore's word for an endpoint that is no URL
            raise StoreError(f"{self.where}: {error}") from error


def _worth_repeating(error: BaseException) -> bool:
    return isinstance(error, StoreUnavailable) and not isinstance(error, UploadGone)


class _Stubborn:
    """Stops when new credentials or a new signature were refused like those before."""

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        self._times += isinstance(error, ClockSkewed | CredentialsExpired)
        return self._times >= _SAME_WORD
