"""Models of the Hugging Face Hub as a source: the revision pinned to a commit first, weights read by ranged requests.

Nothing of a repository is ever run: no code of it is loaded, and its Python files are not even listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

from exporter.contract.errors import SourceAccessDenied, SourceNotFound, WeightlessError
from exporter.source.remote import RemoteReader

TIMEOUT = 60.0
"""Longest wait for the hub to answer one request, in seconds; passing faults are retried five times."""
MAX_LOCAL_FILE = 256 * 2**20
"""Largest file that is downloaded as a whole (configuration, tokenizer), in bytes."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".pt2", ".h5", ".msgpack", ".ckpt")
_LEFT_OUT = (".py", ".pyc", ".so", ".sh", ".pkl", ".pickle")
# The first base of HfHubHTTPError is the HTTP library's own error, whichever library the installed hub client uses.
_TRANSPORT: tuple[type[Exception], ...] = (HfHubHTTPError, HfHubHTTPError.__mro__[1], OfflineModeIsEnabled, OSError)


def _fetch(url: str, name: str, size: int, offset: int, length: int) -> bytes:
    headers = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
        hf_raise_for_status(response)
    except _TRANSPORT as error:
        raise _wrapped(error, name) from error
    whole = length == size and response.status_code == 200
    if (response.status_code != 206 and not whole) or len(response.content) != length:
        raise SourceNotFound(
            f"The hub gave {len(response.content)} bytes of {name} instead of {length}.", file=name, offset=offset
        )
    return response.content


class HubTree:
    """The files of one commit of a model repository. Satisfies `SourceTree`."""

    def __init__(self, repo: str, commit: str, files: Mapping[str, int]) -> None:
        self._repo = repo
        self._commit = commit
        self._files = dict(files)

    @property
    def uri(self) -> str:
        """The repository at its commit."""
        return f"hf://{self._repo}@{self._commit}"

    @property
    def revision(self) -> str | None:
        """The commit, 40 hex digits."""
        return self._commit

    def files(self) -> Mapping[str, int]:
        """Names and sizes; code and pickled objects are left out."""
        return self._files

    def open(self, name: str) -> RemoteReader:
        """Open one file; no request is made before the first read."""
        if name not in self._files:
            raise SourceNotFound(f"The source has no file {name}.", file=name)
        url, size = hf_hub_url(self._repo, name, revision=self._commit), self._files[name]
        return RemoteReader(name, size, partial(_fetch, url, name, size))

    def local_path(self, name: str) -> str | None:
        """A downloaded copy of a small file; None for weights, which are never written to disk."""
        size = self._files.get(name)
        if size is None or size > MAX_LOCAL_FILE or name.lower().endswith(_WEIGHTS):
            return None
        try:
            return str(hf_hub_download(self._repo, name, revision=self._commit))
        except _TRANSPORT as error:
            raise _wrapped(error, name) from error


def open_hub(repo: str, revision: str | None) -> HubTree:
    """The repository at `revision` (by default the hub's), resolved to a commit before anything is read."""
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
    except HFValidationError as error:
        raise SourceNotFound(f"{repo} is not a name that the hub gives.", source=repo) from error
    except _TRANSPORT as error:
        raise _wrapped(error, f"{repo}@{revision or 'default'}") from error
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise SourceNotFound(f"The hub gave no commit for {repo}@{revision or 'default'}.", source=repo)
    files = {
        item.rfilename: int(item.size or 0)
        for item in info.siblings or ()
        if not item.rfilename.lower().endswith(_LEFT_OUT)
        and not any(part in ("", ".", "..") for part in item.rfilename.split("/"))
    }
    return HubTree(repo, commit, files)


def _wrapped(error: Exception, what: str) -> WeightlessError:
    """Our error for one of the hub's, without its URL: a redirect's query holds a signature."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError) or status in (401, 403):
        return SourceAccessDenied(
            f"The hub does not let the exporter read {what}.",
            hint="Accept the model's terms, and give the exporter a token with HF_TOKEN.",
            source=what,
        )
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError) or status == 404:
        return SourceNotFound(f"The hub has no {what}.", source=what)
    return SourceNotFound(
        f"The hub cannot be reached for {what} ({type(error).__name__}).",
        hint="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE of the exporter, then submit again.",
        source=what,
    )
