"""Inductor's compile workers, made small: few of them, forked after everything they import is loaded.

Upstream starts one process that forks a worker per core; each then imports the kernel code generator for itself, 70 MiB
of private memory a worker. Here that process imports it before it forks, through the pickler class that upstream lets a
pool name, so that the workers share those pages.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.compile_worker.subproc_pool import SubprocPickler

_PRELOADED = (
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.runtime.triton_helpers",
    "torch._inductor.runtime.hints",
    "torch._inductor.runtime.compile_tasks",
    "triton.compiler.compiler",
    "triton.backends.nvidia.compiler",
)
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "1048576"}
"""glibc's allocator for the workers: freed memory goes back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class PreloadedPickler(SubprocPickler):
    """Upstream's pickler; it is the module around it that matters, which a worker pool's parent imports first."""


def _preload() -> None:
    for name in _PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.collect()
    # A collection in a worker would write to every object's header and so copy the shared pages.
    gc.freeze()


if any(argument.startswith("--torch-key=") for argument in sys.argv):
    _preload()  # this is the process that forks the workers: upstream passes it that argument


@contextmanager
def small_workers(count: int, last_method: Callable[[], bool]) -> Iterator[None]:
    """`count` compile workers inside, stopped at the end. Workers that run already are stopped first.

    They are stopped before the C++ compile too, once `last_method` says that no further method will need them: the
    compiler alone takes some 300 MiB.
    """
    from torch._inductor import async_compile, codecache, config

    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    pool, compiler = vars(async_compile)["SubprocPool"], vars(codecache.AotCodeCompiler)["compile"]
    compile_code = codecache.AotCodeCompiler.compile

    def compile_without_workers(*args: Any, **kwargs: Any) -> Any:
        if last_method():
            stop_workers()
        return compile_code(*args, **kwargs)

    class SmallPool(pool):  # type: ignore[misc, valid-type]
        """Upstream's pool with our pickler; a class, because upstream asks whether a pool is one."""

        def __init__(self, nprocs: int, **options: Any) -> None:
            super().__init__(nprocs, pickler=PreloadedPickler(), **options)

    stop_workers()
    os.environ.update(_ALLOCATOR)
    setattr(async_compile, "SubprocPool", SmallPool)  # noqa: B010
    setattr(codecache.AotCodeCompiler, "compile", staticmethod(compile_without_workers))  # noqa: B010
    try:
        with config.patch({"compile_threads": count}):
            yield
    finally:
        stop_workers()
        setattr(async_compile, "SubprocPool", pool)  # noqa: B010
        setattr(codecache.AotCodeCompiler, "compile", compiler)  # noqa: B010
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def stop_workers() -> None:
    """End the worker pools of this process; the next compile starts new ones with the environment of then."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def return_freed_memory() -> None:
    """Let glibc give freed blocks of 1 MiB and more back at once, and use two arenas: for this process, from now on.

    Its own threshold grows with the blocks that are freed, up to 32 MiB: part buffers of 16 MiB would then stay.
    """
    try:
        libc = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_THRESHOLD, 2**20), (_M_TRIM_THRESHOLD, 2**17), (_M_ARENA_MAX, 2)):
            libc.mallopt(option, value)
    except (OSError, AttributeError):
        return
