"""Every exception of boto3 and botocore has a meaning for us, and no secret gets into any text."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import boto3.exceptions
import botocore.exceptions as bc
import pytest
import urllib3.exceptions

from exporter.contract.errors import (
    DiskFull,
    InvalidRequest,
    NotFound,
    StoreRejected,
    StoreUnavailable,
    WeightlessError,
)
from exporter.contract.spec import StoreSpec
from exporter.store import s3_errors
from exporter.store.s3 import S3Store
from exporter.store.s3_client import RetryPolicy, S3Client
from tests.stores.conftest import StubFactory
from tests.stores.stub.personality import STRICT, Fault

SETTINGS = {
    # Mistakes in settings or in our own calls: refused for good, with the class's name.
    "AliasConflictParameterError", "ApiVersionNotFoundError", "BaseEndpointResolverError", "BotoCoreError",
    "CapacityNotAvailableError", "ConfigNotFound", "ConfigParseError", "DataNotFoundError", "EndpointProviderError",
    "EndpointResolutionError", "EndpointVariantError", "ImminentRemovalWarning", "InvalidChecksumConfigError",
    "InvalidConfigError", "InvalidDNSNameError", "InvalidDefaultsMode", "InvalidEndpointConfigurationError",
    "InvalidEndpointDiscoveryConfigurationError", "InvalidExpressionError", "InvalidHostLabelError",
    "InvalidMaxRetryAttemptsError", "InvalidProxiesConfigError", "InvalidRegionError",
    "InvalidRetryConfigurationError", "InvalidRetryModeError", "InvalidS3AddressingStyleError",
    "InvalidS3UsEast1RegionalEndpointConfigError", "InvalidSTSRegionalEndpointsConfigError", "MD5UnavailableError",
    "MissingDependencyException", "MissingParametersError", "MissingServiceIdError", "NoRegionError",
    "OperationNotPageableError", "PaginationError", "ParamValidationError", "RangeError", "ServiceNotInRegionError",
    "StubAssertionError", "StubResponseError", "UnStubbedResponseError", "UndefinedModelAttributeError",
    "UnknownClientMethodError", "UnknownEndpointError", "UnknownEndpointResolutionBuiltInName",
    "UnknownFIPSEndpointError", "UnknownKeyError", "UnknownParameterError", "UnknownRegionError",
    "UnknownServiceError", "UnknownServiceStyle", "UnknownSignatureVersionError", "UnseekableStreamError",
    "UnsupportedOutpostResourceError", "UnsupportedS3AccesspointConfigurationError", "UnsupportedS3ArnError",
    "UnsupportedS3ConfigurationError", "UnsupportedS3ControlArnError", "UnsupportedS3ControlConfigurationError",
    "UnsupportedServiceProtocolsError", "UnsupportedSignatureVersionError", "UnsupportedTLSVersionWarning",
    "ValidationError", "WaiterConfigError", "WaiterError",
    # boto3's own: of its resources and transfers, which are not used.
    "Boto3Error", "DynamoDBNeedsConditionError", "DynamoDBNeedsKeyConditionError", "DynamoDBOperationNotSupportedError",
    "DynanmoDBOperationNotSupportedError", "InvalidCrtTransferConfigError",
    "NoVersionFound", "PythonDeprecationWarning", "RetriesExceededError", "ResourceLoadException",
    "ResourceNotExistsError", "S3TransferFailedError", "S3UploadFailedError", "UnknownAPIVersionError",
}  # fmt: skip


def exception_names() -> set[str]:
    found = set()
    for module in (bc, boto3.exceptions):
        for name, item in inspect.getmembers(module, inspect.isclass):
            if issubclass(item, Exception) and item.__module__ in ("botocore.exceptions", "boto3.exceptions"):
                found.add(name)
    return found


def test_every_exception_of_the_libraries_has_a_meaning() -> None:
    mapped = {
        kind.__name__
        for group in (s3_errors.NETWORK, s3_errors.TLS, s3_errors.CREDENTIALS, s3_errors.SERVER)
        for kind in group
    }
    assert exception_names() - mapped - SETTINGS == set(), "a new exception: say in s3_errors.py what it means"
    assert mapped & SETTINGS == set()


def _make(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "SECRET-TEXT")
    return error


@pytest.mark.parametrize("name", sorted(exception_names()))
def test_each_becomes_one_of_ours_without_its_text(name: str) -> None:
    kind = getattr(bc, name, None) or getattr(boto3.exceptions, name)
    error = bc.ClientError({"Error": {"Code": "X"}}, "Op") if issubclass(kind, bc.ClientError) else _make(kind)
    ours = s3_errors.translate(error, "PutObject", "s3://b/k")
    assert isinstance(ours, (StoreRejected, StoreUnavailable))
    assert "SECRET-TEXT" not in str(ours.as_dict())
    assert ours.hint


@pytest.mark.parametrize(
    ("status", "code", "operation", "kind", "passing"),
    [
        (503, "SlowDown", "PutObject", StoreUnavailable, True),
        (500, "InternalError", "PutObject", StoreUnavailable, True),
        (400, "RequestTimeout", "PutObject", StoreUnavailable, True),
        (400, "BadDigest", "UploadPart", StoreUnavailable, True),
        (409, "ConditionalRequestConflict", "PutObject", StoreUnavailable, True),
        (403, "ExpiredToken", "PutObject", StoreUnavailable, True),
        (429, "TooManyRequests", "GetObject", StoreUnavailable, True),
        (403, "AccessDenied", "PutObject", StoreRejected, False),
        (404, "NoSuchBucket", "HeadObject", StoreRejected, False),
        (404, "NoSuchKey", "GetObject", NotFound, False),
        (404, "404", "HeadObject", NotFound, False),
        (404, "NoSuchUpload", "UploadPart", StoreRejected, False),
        (412, "PreconditionFailed", "PutObject", StoreRejected, False),
        (501, "NotImplemented", "PutObject", StoreRejected, False),
        (507, "XMinioStorageFull", "PutObject", DiskFull, False),
        (301, "PermanentRedirect", "PutObject", StoreRejected, False),
        (403, "<script>", "PutObject", StoreRejected, False),
    ],
)
def test_replies(status: int, code: str, operation: str, kind: type[WeightlessError], passing: bool) -> None:
    reply: Any = {"Error": {"Code": code, "Message": "SECRET"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = bc.ClientError(reply, operation)
    assert s3_errors.is_passing(error) is passing
    ours = s3_errors.translate(error, operation, "s3://b/k")
    assert type(ours) is kind
    assert "SECRET" not in str(ours.as_dict())
    assert "<" not in ours.message


def test_refused_uploads_name_the_checksum_setting_and_not_the_credentials() -> None:
    for status in (401, 403, 411, 501):
        reply: Any = {"Error": {"Code": "Nope"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        ours = s3_errors.translate(bc.ClientError(reply, "PutObject"), "PutObject", "s3://b/k")
        assert "WEIGHTLESS_S3_CHECKSUMS" in ours.hint


def test_network_errors_pass_and_others_do_not() -> None:
    for error in (ConnectionResetError(), TimeoutError(), urllib3.exceptions.ProtocolError()):
        assert s3_errors.is_passing(error)
    assert not s3_errors.is_passing(
        bc.SSLError(endpoint_url="https://h", error="certificate verify failed: CERTIFICATE_VERIFY_FAILED")
    )
    assert s3_errors.is_passing(bc.SSLError(endpoint_url="https://h", error="EOF occurred in violation of protocol"))


def test_a_mistake_in_our_own_code_is_not_hidden() -> None:
    client = S3Client(StoreSpec(uri="s3://bucket", endpoint="http://127.0.0.1:9", region="x"))
    with pytest.raises(ZeroDivisionError):
        client.attempt("PutObject", "s3://b/k", lambda _: 1 / 0)


def test_nothing_of_a_servers_text_or_of_the_credentials_is_in_any_error(stub: StubFactory) -> None:
    for fault in (Fault.DENIED, Fault.UNAVAILABLE, Fault.EXPIRED, Fault.INTERNAL, Fault.RESET):
        server, store = stub(STRICT, retry=RetryPolicy(attempts=2, base=0.0))
        server.fault_for = lambda number, operation, it=fault: it  # type: ignore[misc]
        with pytest.raises(WeightlessError) as caught:
            store.put("k", b"x", media_type="text/plain")
        text = "".join(traceback.format_exception(caught.value)) + str(caught.value.as_dict())
        for secret in ("secret-that-a-server-echoes", "AKIDEXAMPLE", "wJalrXUtnFEMI", "Signature"):
            assert secret not in text


def test_a_certificate_that_is_not_trusted_is_named(stub: StubFactory) -> None:
    server, _ = stub(STRICT)
    store = S3Store(StoreSpec(uri="s3://bucket/p", endpoint=server.endpoint), retry=RetryPolicy(attempts=3, base=0.0))
    with pytest.raises(StoreRejected) as caught:
        store.head("k")
    assert "WEIGHTLESS_S3_CA_BUNDLE" in caught.value.hint
    assert store.retries == 0


def test_no_server_is_unavailable_and_no_credentials_are_said(
    credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StoreSpec(uri="s3://bucket/p", endpoint="https://127.0.0.1:9")
    with pytest.raises(StoreUnavailable) as caught:
        S3Store(spec, retry=RetryPolicy(attempts=2, base=0.0)).head("k")
    assert caught.value.retryable
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreRejected, match="credentials"):
        S3Store(spec, retry=RetryPolicy(attempts=2, base=0.0)).head("k")


@pytest.mark.parametrize(
    "endpoint", ["ftp://x", "https://", "nonsense", "https://user:pass@host", "https://h/?q=1", "http://h:99999"]
)
def test_endpoints_that_are_none_are_refused_without_being_repeated(endpoint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        S3Store(StoreSpec(uri="s3://bucket", endpoint=endpoint))
    assert "pass" not in str(caught.value.as_dict())


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3://b", "s3://UPPER_!/x", "s3://bucket/../x", "s3://bucket/a//b"]
)
def test_bad_uris_are_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        S3Store(StoreSpec(uri=uri))
