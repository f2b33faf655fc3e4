"""What an answer of S3, or none, means for us."""

import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

from awscrt.exceptions import AwsCrtError
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
    "InvalidPart": UploadGone,
    "InvalidRange": ObjectCorrupt,
    "BadDigest": ObjectCorrupt,
    "XAmzContentChecksumMismatch": ObjectCorrupt,
    "ExpiredToken": CredentialsExpired,
    "ExpiredTokenException": CredentialsExpired,
    "InvalidToken": CredentialsExpired,
    "TokenRefreshRequired": CredentialsExpired,
    "RequestExpired": ClockSkewed,
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
_TOLERATED_S: Final = 900.0
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


def translate(error: ClientError | BotoCoreError | AwsCrtError, where: str) -> StoreError:
    """Return our error for a client's, as one line that names the place, the request, the fix."""
    fix = ""
    if isinstance(error, ClientError):
        kind, code, text = _of_answer(error)
        if kind is ClockSkewed:
            fix = _clock(error)
    elif isinstance(error, _NO_CREDENTIALS):
        kind, code, text = StoreDenied, type(error).__name__, str(error)
    elif isinstance(error, AwsCrtError | HTTPClientError | ConnectionError | IncompleteReadError):
        code = error.name if isinstance(error, AwsCrtError) else type(error).__name__
        kind, text = StoreUnavailable, str(error)
    else:
        kind, code, text = StoreError, type(error).__name__, str(error)
    fix = fix or _FIX.get(kind, "")
    line = " ".join(f"{where}: {text}".split())
    made = kind(f"{line}; {fix}" if fix else line)
    made.code = code
    return made


def _of_answer(error: ClientError) -> tuple[type[StoreError], str, str]:
    answer: Any = error.response
    about = answer.get("ResponseMetadata", {})
    code = str(answer.get("Error", {}).get("Code", ""))
    message = str(answer.get("Error", {}).get("Message", ""))
    status = int(about.get("HTTPStatusCode", 0))
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if status == 403 and error.operation_name == "HeadObject" and _far_apart(error):
        kind = ClockSkewed  # an answer to HEAD has no body that would say so
    if kind is None:
        # An answer to HEAD has no body: an expired token is a bare 400 there.
        bare = status == 400 and error.operation_name == "HeadObject"
        kind = CredentialsExpired if bare else StoreUnavailable if status >= 500 else StoreError
    request = about.get("RequestId") or about.get("HTTPHeaders", {}).get("x-amz-request-id")
    named = f" ({error.operation_name}, request {request})" if request else ""
    return kind, code or str(status), f"{code or status} {message}".strip() + named


def _clock(error: ClientError) -> str:
    """Say by how much this host's clock differs from the store's, if the answer tells."""
    ahead = _ahead_s(error)
    if ahead is None:
        return ""
    which = "ahead of" if ahead > 0 else "behind"
    return f"set this host's clock: it is {abs(ahead):.0f} s {which} the store's"


def _far_apart(error: ClientError) -> bool:
    """Whether the clocks differ by more than S3 tolerates."""
    return abs(_ahead_s(error) or 0.0) > _TOLERATED_S


def _ahead_s(error: ClientError) -> float | None:
    about: Any = error.response.get("ResponseMetadata", {})
    try:
        theirs = parsedate_to_datetime(about["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None
    return time.time() - theirs
