"""Where a source may be: schemes, roots by whole path components, and files opened without following links.

`check_source` decides by name alone; `open_regular` decides again at the moment of opening, so that a file or folder
swapped for a link in between is refused.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit

from exporter.contract.errors import InvalidRequest, SourceAccessDenied, SourceNotFound, SourceUnsafe
from exporter.contract.spec import SourcePolicy

MAX_FILES = 100_000
"""Most files that one source may list."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://)?", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_HF = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?)"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?",
    re.ASCII,
)
_SCHEMES_HINT = "A source is a path, file:///path, s3://bucket/prefix or hf://owner/name@revision."


@dataclass(frozen=True, slots=True)
class Location:
    """A source that was found to be allowed.

    `path` is the real path of a file source, the key (no leading or trailing slash) of an s3 one, the repository of
    a hub one; `bucket` and `revision` are None where they mean nothing.
    """

    scheme: Literal["file", "s3", "hf"]
    uri: str
    path: str
    bucket: str | None = None
    revision: str | None = None


def check_source(uri: str, policy: SourcePolicy) -> Location:
    """The place that `uri` names, if `policy` allows it. Touches nothing but the links on a local path.

    Raises `SourceAccessDenied` for a place outside the roots or an unknown scheme, `InvalidRequest` for a URI that
    cannot be read. Neither says whether anything exists outside the roots.
    """
    if not uri or not uri.isprintable():
        raise InvalidRequest("The source is empty or has unprintable characters.", hint=_SCHEMES_HINT)
    match = _SCHEME.match(uri)
    if match is None:
        return _check_file(uri, uri, policy)
    scheme = match.group(1).lower()
    if scheme == "file":
        return _check_file(uri, _file_uri_path(uri), policy)
    if scheme == "s3":
        return _check_s3(uri, policy)
    if scheme == "hf":
        return _check_hf(uri, policy)
    raise SourceAccessDenied(
        f"Sources of scheme {scheme!r} are not read: only file, s3 and hf are.", hint=_SCHEMES_HINT, scheme=scheme
    )


def is_within(path: PurePosixPath, root: PurePosixPath) -> bool:
    """Whether `path` is `root` or lies under it, by whole components. Both normalised already."""
    return path.parts[: len(root.parts)] == root.parts


def _file_uri_path(uri: str) -> str:
    try:
        parts = urlsplit(uri)
        path = unquote(parts.path, errors="strict")
    except ValueError as error:
        raise InvalidRequest("The file URI cannot be read.", hint=_SCHEMES_HINT) from error
    if parts.netloc not in ("", "localhost"):
        raise SourceAccessDenied("A file source names no host.", hint="Write file:///path with three slashes.")
    if parts.query or parts.fragment or "%00" in uri:
        raise InvalidRequest("A file source has a path only.", hint=_SCHEMES_HINT)
    if not path.startswith("/"):
        raise InvalidRequest("A file URI needs an absolute path.", hint="Write file:///path with three slashes.")
    return path


def _check_file(uri: str, path: str, policy: SourcePolicy) -> Location:
    if "\0" in path:
        raise InvalidRequest("The source's path has a zero byte.", hint=_SCHEMES_HINT)
    try:
        real = os.path.realpath(path)
    except OSError as error:
        raise SourceAccessDenied("The source's path cannot be followed.") from error
    if not any(is_within(PurePosixPath(real), PurePosixPath(root)) for root in file_roots(policy)):
        raise SourceAccessDenied("The source lies outside the directories that may be read.", source=uri)
    return Location("file", uri, real)


def file_roots(policy: SourcePolicy) -> tuple[str, ...]:
    """The real paths of the policy's directories."""
    roots = []
    for root in policy.roots:
        if root.startswith("file:"):
            root = _file_uri_path(root)
        elif not root or _SCHEME.match(root):
            continue
        roots.append(os.path.realpath(root))
    return tuple(roots)


def _split_s3(uri: str) -> tuple[str, str]:
    """Bucket and key of an ``s3://`` URI; no slash at either end of the key."""
    rest = uri.split("://", 1)[1] if "://" in uri else ""
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise InvalidRequest(
            "An s3 source is s3://bucket/prefix, without credentials, port or endpoint.",
            hint="The endpoint is the operator's setting; the URI names the bucket and the prefix only.",
        )
    if "?" in key or "#" in key:
        raise InvalidRequest("An s3 source has no query and no fragment.", hint=_SCHEMES_HINT)
    # A key is literal for S3, but something in between may decode or normalise it: refuse what could then move.
    for form in (key, unquote(key), unquote(unquote(key))):
        if any(part in (".", "..") for part in re.split(r"[/\\]", form)) or "\0" in form:
            raise SourceAccessDenied("The source's key has dot components or a zero byte.", source=uri)
    if "//" in key.rstrip("/") or unquote(key).count("/") != key.count("/"):
        raise SourceAccessDenied("The source's key has empty or escaped components.", source=uri)
    return bucket, key.strip("/")


def _check_s3(uri: str, policy: SourcePolicy) -> Location:
    bucket, key = _split_s3(uri)
    place = PurePosixPath(bucket, key)
    for root in policy.roots:
        if root.startswith("s3://"):
            root_bucket, root_key = _split_s3(root)
            if is_within(place, PurePosixPath(root_bucket, root_key)):
                return Location("s3", uri, key, bucket=bucket)
    raise SourceAccessDenied("The source lies outside the s3 prefixes that may be read.", source=uri)


def _check_hf(uri: str, policy: SourcePolicy) -> Location:
    match = _HF.fullmatch(uri.split("://", 1)[1] if "://" in uri else "")
    if match is None or ".." in uri or "--" in match["repo"]:
        raise InvalidRequest(
            "A hub source is hf://owner/name or hf://owner/name@revision.", hint=_SCHEMES_HINT, source=uri
        )
    if not policy.hf:
        raise SourceAccessDenied(
            "hf:// sources are switched off.", hint="The operator can switch them on with WEIGHTLESS_HF.", source=uri
        )
    return Location("hf", uri, match["repo"], revision=match["revision"])


def open_regular(path: str, roots: Sequence[str]) -> int:
    """A descriptor for reading of the regular file at `path`, which must be a real path under one of `roots`.

    Every component is opened in turn and none may be a link, so the answer of `check_source` still holds for the file
    that is opened. Devices, sockets and FIFOs are refused without waiting for them.
    """
    pure = PurePosixPath(path)
    if not any(is_within(pure, PurePosixPath(root)) for root in roots) or ".." in pure.parts:
        raise SourceAccessDenied("The file lies outside the directories that may be read.", file=pure.name)
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in pure.parts[1:-1]:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(pure.name, flags, dir_fd=folder)
    except OSError as error:
        raise _open_error(error, pure.name) from error
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceUnsafe(
            f"{pure.name} is not a regular file.", hint="Devices, FIFOs, sockets and folders are not read as weights."
        )
    return descriptor


def _open_error(error: OSError, name: str) -> Exception:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return SourceAccessDenied(f"{name} or a folder above it became a link while it was being read.", file=name)
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceAccessDenied(
            f"{name} may not be read by the exporter's user.", hint="Give that user read permission.", file=name
        )
    if error.errno == errno.ENXIO:
        return SourceUnsafe(f"{name} is not a regular file.", hint="Sockets and devices are not read as weights.")
    return SourceNotFound(f"{name} is not there.", file=name)


def is_folder(path: str) -> bool:
    """Whether a real path is a folder; links do not count."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def regular_files(root: str, roots: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Regular files under the real folder `root`, by relative POSIX name: real path and size.

    Links to folders are not followed, links to files only inside `roots`: `SourceAccessDenied` names one that leads
    out. Devices, sockets and FIFOs are left out.
    """
    found: dict[str, tuple[str, int]] = {}
    pure_roots = [PurePosixPath(place) for place in roots]
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            path = Path(folder, name)
            real = os.path.realpath(path)
            if not any(is_within(PurePosixPath(real), place) for place in pure_roots):
                inside = path.relative_to(root).as_posix()
                raise SourceAccessDenied(f"{inside} is a link out of the directories that may be read.", file=inside)
            try:
                status = os.lstat(real)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                found[path.relative_to(root).as_posix()] = (real, status.st_size)
                if len(found) > MAX_FILES:
                    raise SourceUnsafe(f"The source has more than {MAX_FILES} files.", hint="Name a narrower folder.")
    return found
