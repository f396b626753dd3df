"""From a URI to the files of a confined and pinned source."""

from __future__ import annotations

from collections.abc import Callable

from exporter.contract.errors import SourceNotFound
from exporter.contract.spec import SourcePolicy
from exporter.source.confine import check_source, file_roots
from exporter.source.local import LocalTree
from exporter.source.ports import ObjectReads, SourceTree
from exporter.source.remote import ObjectTree


def resolve(uri: str, policy: SourcePolicy, objects: Callable[[str], ObjectReads]) -> SourceTree:
    """The files at `uri`, which `policy` must allow; `objects` opens the reads of a bucket by name.

    A hub's revision is resolved to 40 hex digits before anything is read. Raises `SourceAccessDenied`,
    `SourceNotFound`, `SourceUnsafe` or `InvalidRequest`.
    """
    place = check_source(uri, policy)
    tree: SourceTree
    if place.scheme == "file":
        tree = LocalTree(uri, place.path, file_roots(policy))
    elif place.scheme == "s3":
        tree = ObjectTree(uri, place.path, objects(place.bucket or ""))
    else:
        from exporter.source.hub import open_hub

        tree = open_hub(place.path, place.revision)
    if not tree.files():
        raise SourceNotFound("The source has no files.", source=uri)
    return tree
