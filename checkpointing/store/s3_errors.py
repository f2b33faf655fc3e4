"""What an answer of S3, or none, means for us."""

from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    TokenRetrievalError,
)

from checkpointing.errors import (
    ObjectCorrupt,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreThrottled,
    StoreUnavailable,
)


class KeyExists(StoreError):
    """412: the key of a conditional put exists, perhaps because of our own lost put."""


class UploadGone(StoreUnavailable):
    """The multipart upload was aborted by somebody: begin it again."""


class CredentialsExpired(StoreUnavailable):
    """The session token ran out: fetch a new one and try again."""


class ClockSkewed(StoreUnavailable):
    """The request was signed too long ago, or the clock is wrong: sign again."""


_BY_CODE: Final[dict[str, type[StoreError]]] = {
    "PreconditionFailed": KeyExists,
    "NoSuchBucket": StoreMissing,
    "NoSuchKey": ObjectMissing,
    "NoSuchUpload": UploadGone,
    "InvalidRange": ObjectCorrupt,
    "BadDigest": ObjectCorrupt,
    "XAmzContentChecksumMismatch": ObjectCorrupt,
    "ExpiredToken": CredentialsExpired,
    "ExpiredTokenException": CredentialsExpired,
    "InvalidToken": CredentialsExpired,
    "RequestTimeTooSkewed": ClockSkewed,
    "RequestTimeout": StoreUnavailable,
    "ConditionalRequestConflict": StoreUnavailable,
    "OperationAborted": StoreUnavailable,
    "SlowDown": StoreThrottled,
    "SlowDownRead": StoreThrottled,
    "SlowDownWrite": StoreThrottled,
    "Throttling": StoreThrottled,
    "ThrottlingException": StoreThrottled,
    "InvalidAccessKeyId": StoreDenied,
    "SignatureDoesNotMatch": StoreDenied,
    "AccessDenied": StoreDenied,
}
_BY_STATUS: Final[dict[int, type[StoreError]]] = {
    401: StoreDenied,
    403: StoreDenied,
    404: ObjectMissing,
    409: StoreUnavailable,
    412: KeyExists,
    416: ObjectCorrupt,
    429: StoreThrottled,
    503: StoreThrottled,
}
_NO_CREDENTIALS: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
)
_FIX: Final[dict[type[StoreError], str]] = {
    StoreDenied: "check the credentials (environment, profile or role) and the bucket policy",
    StoreMissing: "create the bucket or correct the store url",
    StoreUnavailable: "check the endpoint and the network",
    CredentialsExpired: "renew the credentials of this host",
    ClockSkewed: "set this host's clock",
}


def translate(error: ClientError | BotoCoreError, where: str) -> StoreError:
    """Return our error for botocore's, as one line that names the place and the fix."""
    if isinstance(error, ClientError):
        kind, text = _of_answer(error)
    elif isinstance(error, _NO_CREDENTIALS):
        kind, text = StoreDenied, str(error)
    elif isinstance(error, HTTPClientError | ConnectionError | IncompleteReadError):
        kind, text = StoreUnavailable, str(error)
    else:
        kind, text = StoreError, str(error)
    fix = _FIX.get(kind)
    line = " ".join(f"{where}: {text}".split())
    return kind(f"{line}; {fix}" if fix else line)


def _of_answer(error: ClientError) -> tuple[type[StoreError], str]:
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = StoreUnavailable if status >= 500 else StoreError
    return kind, f"{code or status} {message}".strip()
