"""A folder of its own for everything that a compile writes: sources, headers, kernels, caches. Removed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.lowering.compile_workers import stop_workers

_VARIABLES = {"TMPDIR": "tmp", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@contextmanager
def compile_folder() -> Iterator[Path]:
    """Point TMPDIR and the compilers' caches at a new folder below the current TMPDIR.

    Inductor keeps precompiled headers (about 280 MB) under TMPDIR whatever its cache setting is, so TMPDIR is set too.
    The compile workers inherit the variables; they are stopped before the folder is removed.
    """
    stop_workers()  # those of before have the old variables
    folder = Path(tempfile.mkdtemp(prefix="weightless-compile-"))
    before = {name: os.environ.get(name) for name in _VARIABLES}
    before_default = tempfile.tempdir
    from torch._inductor import codecache

    headers = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    try:
        for name, part in _VARIABLES.items():
            (folder / part).mkdir()
            os.environ[name] = str(folder / part)
        tempfile.tempdir = None
        # Both were derived from the TMPDIR of the time when Inductor was imported.
        codecache._HEADER_DIR = str(folder / "tmp" / "headers")
        codecache._HEADER_LOCK_DIR = str(folder / "tmp" / "headers" / "locks")
        codecache._precompile_header.cache_clear()
        yield folder
    finally:
        stop_workers()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = before_default
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers
        codecache._precompile_header.cache_clear()
        shutil.rmtree(folder, ignore_errors=True)
