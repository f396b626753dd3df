"""The early check of a source's URI at POST: pure text and `realpath`, standard library only.

The exporter checks again, and the realpath of each file that it opens: this check answers early, that one protects.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from exporter.contract.errors import SourceAccessDenied

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_HF = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@[\w./-]{1,128})?(/[\w.-]+)*", re.ASCII)


def check_source(uri: str, roots: Iterable[str], *, hf: bool) -> None:
    """`SourceAccessDenied` unless the source's scheme is allowed and it lies under one of `roots`."""
    scheme, rest = _split(uri)
    if scheme == "hf":
        if not hf:
            raise _denied("hf:// sources are not allowed here", hint="Ask the operator to set WEIGHTLESS_HF.")
        if not _HF.fullmatch(rest) or any(part in (".", "..") for part in rest.split("/")):
            raise _denied("a hub source is hf://owner/name@revision")
        return
    forms = [_s3_path(rest)] if scheme == "s3" else _file_paths(rest)
    allowed = [_root_path(root) for root in roots if root.startswith("s3://") == (scheme == "s3")]
    for form in forms:
        if not any(_under(form, root) for root in allowed):
            raise _denied("the source is outside of the directories and prefixes that may be read")


def normalised(uri: str) -> str:
    """The URI with its escapes decoded and `.` and `..` resolved, as policy globs see it."""
    scheme, rest = _split(uri)
    if scheme == "hf":
        return uri
    path = _s3_path(rest) if scheme == "s3" else _file_paths(rest)[0]
    return f"{scheme}://{path.lstrip('/') if scheme == 's3' else path}"


def _split(uri: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(uri)
    if match is None:
        raise _denied("a source is a URI: s3://, hf:// or file://")
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme not in ("s3", "hf", "file"):
        raise _denied(f"sources with the scheme {scheme[:32]} are not allowed; only s3, hf and file are")
    return scheme, rest


def _decoded(text: str) -> str:
    """`text` without percent escapes, however often they are nested; control characters are refused."""
    for _ in range(8):
        plain = unquote(text, errors="strict") if "%" in text else text
        if plain == text:
            break
        text = plain
    else:
        raise _denied("the source's percent escapes are nested too deeply")
    if not text.isprintable() or "\\" in text:
        raise _denied("the source has control characters or backslashes in its path")
    return text


def _clean_path(text: str) -> str:
    try:
        path = _decoded(text)
    except UnicodeDecodeError as error:
        raise _denied("the source's percent escapes are not UTF-8") from error
    return "/" + posixpath.normpath("/" + path).lstrip("/")


def _s3_path(rest: str) -> str:
    bucket = rest.split("/", 1)[0]
    if not _BUCKET.fullmatch(bucket):
        raise _denied("the source's bucket is not a bucket name")
    path = _clean_path(rest)
    if path.split("/")[1] != bucket:
        raise _denied("the source's key leaves its bucket")
    return path


def _file_paths(rest: str) -> list[str]:
    """The path as written and, because a link may lead out, what it resolves to."""
    if not rest.startswith("/"):
        raise _denied("a file source has no host: file:///absolute/path")
    path = _clean_path(rest)
    try:
        return [path, str(Path(path).resolve())]
    except (OSError, RuntimeError) as error:
        raise _denied("the source's path cannot be resolved") from error


def _root_path(root: str) -> str:
    if root.startswith("s3://"):
        return _clean_path(root.removeprefix("s3://"))
    return _clean_path(root.removeprefix("file://"))


def _under(path: str, root: str) -> bool:
    """Whether `path` is `root` or below it, by whole components; a file root counts with its links resolved too."""
    bases = {root, str(Path(root).resolve())}
    return any(path == base or path.startswith(base.rstrip("/") + "/") for base in bases)


def _denied(message: str, hint: str | None = None) -> SourceAccessDenied:
    return SourceAccessDenied(message, hint=hint, field="source")
