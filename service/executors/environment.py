"""The environment of an exporter: an allow-list, so that nothing of the service's own reaches it by being forgotten.

No `WEIGHTLESS_*`, no database URL, no webhook key. HOME and TMPDIR lie in the job's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import exporter.contract.base as contract_base

NAMES = frozenset(
    {
        "PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "CPATH",
        "CC",
        "CXX",
        "OMP_NUM_THREADS",
        "MAX_JOBS",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TRITON_PTXAS_PATH",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "AWS_CA_BUNDLE",
        "HF_TOKEN",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
    }
)
PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "AWS_")
_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}


def exporter_environment(
    folder: Path, outer: Mapping[str, str] | None = None, *, gpu: str | None = None
) -> dict[str, str]:
    """Variables of an exporter whose job folder is `folder`; `gpu` is what CUDA_VISIBLE_DEVICES becomes."""
    outer = os.environ if outer is None else outer
    kept = {name: value for name, value in outer.items() if name in NAMES or name.startswith(PREFIXES)}
    home, scratch = folder / "tmp" / "home", folder / "tmp"
    for name, file in _AWS_FILES.items():
        # boto3 looks below HOME, which moves: name the operator's own files where there are any.
        path = Path(outer.get("HOME", "/nonexistent")) / ".aws" / file
        if name not in kept and path.is_file():
            kept[name] = str(path)
    kept |= {
        "HOME": str(home),
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "CUDA_CACHE_PATH": str(scratch / "cuda"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": _python_path(outer.get("PYTHONPATH", "")),
    }
    kept.setdefault("PATH", os.defpath)
    if gpu is not None:
        kept["CUDA_VISIBLE_DEVICES"] = gpu
    if not kept["PYTHONPATH"]:
        del kept["PYTHONPATH"]
    return kept


def _python_path(given: str) -> str:
    """The search path with this checkout's root in front, where the packages are not installed."""
    root = Path(contract_base.__file__).resolve().parents[2]
    parts = [str(Path(part).absolute()) for part in given.split(os.pathsep) if part]
    if root.name not in ("site-packages", "dist-packages") and str(root) not in parts:
        parts.insert(0, str(root))
    return os.pathsep.join(parts)
