"""From what boto3, botocore and the network raise to our errors. No text of a server or library is passed on.

A server's message may echo a key id, a token or a signature, so ours are made from the operation, the place, the HTTP
status and the error code alone.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from typing import Any

import boto3.exceptions
import botocore.exceptions as bc
import botocore.parsers
import urllib3.exceptions

from exporter.contract.errors import DiskFull, NotFound, StoreRejected, StoreUnavailable, WeightlessError

CREDENTIALS_HINT = "Give credentials to boto3's chain (environment, profile, role); see `weightless doctor`."
CHECKSUM_HINT = (
    "The store may not take checksum headers: set WEIGHTLESS_S3_CHECKSUMS=off, or WEIGHTLESS_S3_PROFILE to its kind."
)
_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")

PASSING_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
"""Error codes that a retry can cure, whatever their status. BadDigest: the body was damaged on its way."""
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
"""Credentials that were good a moment ago: retried with fresh ones."""
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

# Every public exception of botocore and boto3, by what it means for us. A test fails when a release adds one.
NETWORK: frozenset[type[Exception]] = frozenset(
    {
        bc.HTTPClientError,
        bc.ConnectionError,
        bc.EndpointConnectionError,
        bc.ConnectionClosedError,
        bc.ReadTimeoutError,
        bc.ConnectTimeoutError,
        bc.ProxyConnectionError,
        bc.ResponseStreamingError,
        bc.IncompleteReadError,
        bc.ChecksumError,
        bc.FlexibleChecksumError,
        bc.AwsChunkedWrapperError,
    }
)
TLS: frozenset[type[Exception]] = frozenset({bc.SSLError})
CREDENTIALS: frozenset[type[Exception]] = frozenset(
    {
        bc.NoCredentialsError,
        bc.NoAuthTokenError,
        bc.TokenRetrievalError,
        bc.UnknownTokenProviderError,
        bc.PartialCredentialsError,
        bc.CredentialRetrievalError,
        bc.UnknownCredentialError,
        bc.MetadataRetrievalError,
        bc.SSOError,
        bc.SSOTokenLoadError,
        bc.UnauthorizedSSOTokenError,
        bc.LoginError,
        bc.LoginRefreshRequired,
        bc.LoginInsufficientPermissions,
        bc.LoginTokenLoadError,
        bc.LoginAuthorizationCodeError,
        bc.RefreshWithMFAUnsupportedError,
        bc.ProfileNotFound,
        bc.InfiniteLoopConfigError,
        bc.InvalidIMDSEndpointError,
        bc.InvalidIMDSEndpointModeError,
    }
)
MAX_RETRY_AFTER = 60.0
"""Seconds; a store that asks for more is asked again after these."""
SERVER: frozenset[type[Exception]] = frozenset({bc.ClientError, bc.EventStreamError})


def is_passing(error: Exception) -> bool:
    """Whether the same call may succeed if it is made again."""
    if isinstance(error, bc.ClientError):
        code = code_of(error)
        return code in PASSING_CODES or code in EXPIRED_CODES or status_of(error) in PASSING_STATUS
    if isinstance(error, bc.SSLError):
        return "CERTIFICATE" not in str(error).upper()  # a broken connection; a certificate does not get better
    if isinstance(error, botocore.parsers.ResponseParserError):
        return True
    if isinstance(error, (bc.BotoCoreError, boto3.exceptions.Boto3Error)):
        return isinstance(error, tuple(NETWORK))
    return isinstance(error, (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError))


def is_expired(error: Exception) -> bool:
    """Whether a reply says that credentials which were good are too old now."""
    return isinstance(error, bc.ClientError) and code_of(error) in EXPIRED_CODES


def is_unexplained(error: Exception) -> bool:
    """Whether a reply refuses without an error code, as all refusals of a HEAD do."""
    return isinstance(error, bc.ClientError) and code_of(error) == str(status_of(error)) in ("400", "401", "403")


def translate(error: Exception, operation: str, place: str) -> WeightlessError:
    """Our error for what `operation` on `place` raised."""
    kind = type(error).__name__
    if isinstance(error, bc.ClientError):
        return _from_reply(error, operation, place)
    if isinstance(error, bc.SSLError):
        if is_passing(error):
            return StoreUnavailable(f"the TLS connection broke at {operation} of {place}", cause=kind)
        return StoreRejected(
            f"the store's certificate was refused at {operation} of {place}",
            hint="Set WEIGHTLESS_S3_CA_BUNDLE to the file with the certificate authority of the store.",
            cause=kind,
        )
    if isinstance(error, tuple(CREDENTIALS)):
        return StoreRejected(f"there are no usable credentials for {place}", hint=CREDENTIALS_HINT, cause=kind)
    if is_passing(error):
        return StoreUnavailable(f"the store could not be reached at {operation} of {place}: {kind}", cause=kind)
    return StoreRejected(
        f"{operation} of {place} could not be asked: {kind}",
        hint="Check WEIGHTLESS_STORE and the WEIGHTLESS_S3_* settings.",
        cause=kind,
    )


def _from_reply(error: bc.ClientError, operation: str, place: str) -> WeightlessError:
    code, status = code_of(error), status_of(error)
    said = f"{operation} of {place} was answered {status or 'with an error'} {code}".rstrip()
    details: dict[str, Any] = {"code": code, "status": status, "operation": operation}
    if code == "NoSuchBucket":
        return StoreRejected(
            f"there is no bucket for {place}", hint="Create the bucket, or correct WEIGHTLESS_STORE.", **details
        )
    if status == 404 and operation in ("HeadObject", "GetObject", "DeleteObject"):
        return NotFound(f"there is no object {place}", **details)
    if status == 507 or code in ("XMinioStorageFull", "InsufficientCapacity"):
        return DiskFull(said, hint="Free space in the object store, then retry.", **details)
    if is_passing(error):
        return StoreUnavailable(said, **details)
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"):
        return StoreRejected(said, hint=f"{CREDENTIALS_HINT} The region may be wrong, too.", **details)
    if status in (401, 403, 411, 501) and operation in ("PutObject", "UploadPart", "CreateMultipartUpload"):
        return StoreRejected(said, hint=f"Check that writing is allowed there. {CHECKSUM_HINT}", **details)
    return StoreRejected(said, **details)


def is_upload_gone(error: bc.ClientError) -> bool:
    """Whether a reply says that there is no such upload; Ceph calls it NoSuchKey at some operations."""
    return status_of(error) == 404 and code_of(error) != "NoSuchBucket"


def code_of(error: bc.ClientError) -> str:
    """The error code of a reply, empty where it is none that could stand in a message."""
    code = str(_part(error.response, "Error").get("Code", ""))
    return code if _CODE.fullmatch(code) else ""


def status_of(error: bc.ClientError) -> int:
    """The HTTP status of a reply, 0 where unknown."""
    status = _part(error.response, "ResponseMetadata").get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0


def retry_after(error: Exception) -> float:
    """Seconds that a reply asks to be left alone for, at most `MAX_RETRY_AFTER`; 0 where it does not say."""
    if not isinstance(error, bc.ClientError):
        return 0.0
    headers = _part(error.response, "ResponseMetadata").get("HTTPHeaders")
    told = str(headers.get("retry-after", "")) if isinstance(headers, Mapping) else ""
    return min(MAX_RETRY_AFTER, float(told)) if told.isascii() and told.isdigit() and len(told) < 10 else 0.0


def _part(response: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = response.get(name)
    return part if isinstance(part, Mapping) else {}
