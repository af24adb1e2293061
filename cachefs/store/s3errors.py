"""The one table from what S3 clients raise to the error tree.

Codes first, because stores agree on them more than on statuses; then the HTTP status; then the kind
of botocore exception. Messages are made of the request, the code and the server's own sentence:
request headers, and with them credentials, never get into one.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from typing import Any

import urllib3.exceptions
from botocore import exceptions as boto

from cachefs.errors import (
    CachefsError,
    Corrupt,
    CredentialsError,
    NoSuchUpload,
    NotFound,
    PreconditionFailed,
    Refused,
    StoreError,
    StoreUnreachable,
    Throttled,
    Transient,
)

MESSAGE_LIMIT = 300
"""Characters of a server's sentence that are passed on."""

_CODES: dict[type[StoreError], tuple[str, ...]] = {
    Throttled: (
        "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "Throttling",
        "ThrottlingException", "ThrottledException", "RequestThrottled",
        "RequestThrottledException", "RequestLimitExceeded", "TooManyRequests",
        "TooManyRequestsException", "BandwidthLimitExceeded", "LimitExceededException",
        "ProvisionedThroughputExceededException", "PriorRequestNotComplete",
    ),
    Transient: (
        "InternalError", "InternalFailure", "InternalServerError", "RequestTimeout",
        "RequestTimeoutException", "RequestTimeTooSkewed", "OperationAborted", "ServerBusy",
        "IncompleteBody", "Busy",
    ),
    CredentialsError: (
        "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken",
        "InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException",
        "SignatureDoesNotMatch", "AuthFailure", "NotSignedUp", "AuthorizationHeaderMalformed",
        "RequestExpired", "MissingSecurityHeader", "CredentialsNotSupported",
    ),
    Refused: (
        "AccessDenied", "AllAccessDisabled", "AccountProblem", "NoSuchBucket", "InvalidBucketName",
        "QuotaExceeded", "StorageFull", "XMinioStorageFull", "InsufficientStorage",
        "EntityTooLarge", "EntityTooSmall", "KeyTooLongError", "MetadataTooLarge",
        "InvalidObjectState", "NotImplemented", "MethodNotAllowed", "PermanentRedirect",
    ),
    PreconditionFailed: ("PreconditionFailed", "ConditionalRequestConflict"),
    Corrupt: (
        "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
        "XMinioContentChecksumMismatch", "ChecksumMismatch", "InvalidChecksum",
    ),
    NotFound: ("NoSuchKey", "NoSuchVersion", "NoSuchObject"),
    NoSuchUpload: ("NoSuchUpload",),
}  # fmt: skip
_KIND_OF_CODE = {code: kind for kind, codes in _CODES.items() for code in codes}

_KIND_OF_STATUS: dict[int, type[StoreError]] = {
    401: CredentialsError,
    404: NotFound,
    408: Transient,
    409: Transient,
    412: PreconditionFailed,
    416: Refused,
    429: Throttled,
    503: Throttled,
    501: Refused,
    507: Refused,
}

_HINTS: dict[str, str] = {
    "NoSuchBucket": "create the bucket, or correct the store URL",
    "AccessDenied": "check the permissions of these credentials on bucket and prefix",
    "PermanentRedirect": "set store.region to the bucket's region",
    "RequestTimeTooSkewed": "set this machine's clock",
}
_CREDENTIALS_HINT = "check the AWS_* variables, the profile and the credential files"

_CONNECT_ERRORS = (
    boto.EndpointConnectionError,
    boto.ConnectTimeoutError,
    boto.ProxyConnectionError,
    boto.SSLError,
)
_NETWORK_ERRORS = (
    boto.HTTPClientError,  # read timeouts and connections that closed are subclasses
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ChecksumError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)
_CREDENTIAL_ERRORS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.ConfigNotFound,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
    boto.MetadataRetrievalError,
    boto.InvalidConfigError,
)


def translate(error: Exception, request: str) -> Exception:
    """The error to raise instead of `error`, which came out of `request` (such as `PUT
    s3://b/key`). An exception that is no trouble with the store comes back unchanged."""
    inner = _inner(error)
    if isinstance(inner, CachefsError):
        return inner
    if isinstance(error, boto.ClientError):
        return _from_reply(error.response, request)
    if isinstance(error, _CREDENTIAL_ERRORS):
        return CredentialsError(f"{request}: {_line(error)}", hint=_CREDENTIALS_HINT)
    if isinstance(error, _CONNECT_ERRORS):
        return StoreUnreachable(f"{request}: {_line(error)}", hint="check store.endpoint")
    if isinstance(error, _NETWORK_ERRORS):
        return Transient(f"{request}: {_line(inner)}")
    if isinstance(error, boto.ParamValidationError):
        return Refused(f"{request}: {_line(error)}")
    if isinstance(error, boto.BotoCoreError):
        # Parsing a garbled reply is the common one; whatever it is, data is safe and time may help.
        return Transient(f"{request}: {type(error).__name__}: {_line(error)}")
    return error


def from_code(code: str, message: str, request: str) -> StoreError:
    """An error that came inside a reply, as those of a batch delete do."""
    return _build(_KIND_OF_CODE.get(code, Transient), code, message, request)


def code_of(error: BaseException | None) -> str:
    """The store's own code for what became `error`; empty if it gave none."""
    cause = error.__cause__ if error is not None else None
    if not isinstance(cause, boto.ClientError):
        return ""
    return str(cause.response.get("Error", {}).get("Code", ""))


def _from_reply(response: Mapping[str, Any], request: str) -> StoreError:
    details, about = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), int(about.get("HTTPStatusCode", 0))
    kind = _KIND_OF_CODE.get(code) or _KIND_OF_STATUS.get(status)
    if kind is None:
        kind = Transient if status >= 500 or status == 0 else Refused
    error = _build(kind, code or str(status), str(details.get("Message", "")), request)
    if isinstance(error, Throttled):
        error.retry_after = _seconds(about.get("HTTPHeaders", {}).get("retry-after"))
    return error


def _build(kind: type[StoreError], code: str, message: str, request: str) -> StoreError:
    hint = _HINTS.get(code, _CREDENTIALS_HINT if kind is CredentialsError else "")
    text = " ".join(message.split())[:MESSAGE_LIMIT]
    return kind(f"{request}: {code}: {text}" if text else f"{request}: {code}", hint=hint)


def _inner(error: BaseException) -> BaseException:
    """What botocore wrapped: it puts anything raised while sending, our own errors included, into
    an HTTPClientError."""
    while isinstance(error, boto.HTTPClientError):
        wrapped: object = getattr(error, "kwargs", {}).get("error")
        if not isinstance(wrapped, BaseException):
            break
        error = wrapped
    return error


def _line(error: BaseException) -> str:
    """One line of an exception, without query strings (they may be signed) and object addresses."""
    text = " ".join(str(error).split())
    text = re.sub(r"\?[^\s'\"]*", "", text)
    text = re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>:? ?", "", text)
    return text[:MESSAGE_LIMIT] or type(error).__name__


def _seconds(value: str | None) -> float | None:
    """A Retry-After header in seconds from now: a number or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
