"""`open_store`: the one place that knows which URI scheme is which store."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import StoreSpec

if TYPE_CHECKING:
    from exporter.store.local import LocalStore
    from exporter.store.memory import MemoryStore
    from exporter.store.s3 import S3Store

    Store: TypeAlias = LocalStore | MemoryStore | S3Store
    """One object that satisfies `MultipartTarget`, `StoreReads`, `StoreDeletes` and `ArtifactStore`."""


def open_store(spec: StoreSpec) -> Store:
    """The store of `spec.uri`: ``file:///dir``, ``s3://bucket/prefix`` or ``memory://name``.

    Nothing is created or asked for yet. `InvalidRequest` for any other URI. boto3 is imported only for ``s3://``.
    """
    scheme = spec.uri.partition("://")[0].lower()
    if scheme == "file":
        from exporter.store.local import LocalStore

        return LocalStore(spec.uri)
    if scheme == "s3":
        from exporter.store.s3 import S3Store

        return S3Store(spec)
    if scheme == "memory":
        from exporter.store.memory import MemoryStore

        return MemoryStore(spec.uri)
    raise InvalidRequest(
        f"{scheme[:20]!r} is not a kind of store", hint="A store is file:///dir, s3://bucket/prefix or memory://name."
    )
