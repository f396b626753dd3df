"""From whatever stopped an export to the one error that is reported."""

from __future__ import annotations

import errno
import logging
import traceback
import uuid
from collections.abc import Iterator

from exporter.contract.errors import (
    DiskFull,
    GpuOutOfMemory,
    HostOutOfMemory,
    InternalError,
    WeightlessError,
)

log = logging.getLogger("exporter")
_HOST = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory", "std::bad_alloc", "unable to mmap")
_GPU = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")


def classify(error: BaseException, stage: str | None) -> WeightlessError:
    """The error to report, with the stage. A foreign one gets an incident id; its traceback goes to the log alone."""
    found = _memory(error, stage) or _ours(error)
    if found is None:
        incident = uuid.uuid4().hex[:12]
        log.error("incident %s\n%s", incident, "".join(traceback.format_exception(error)))
        found = InternalError(
            f"the export failed while {stage or 'starting'}: {type(error).__name__}", incident=incident
        )
    elif type(found) is InternalError and "incident" not in found.details:
        found.details["incident"] = uuid.uuid4().hex[:12]
        log.error("incident %s\n%s", found.details["incident"], "".join(traceback.format_exception(error)))
    found.stage = found.stage or stage
    return found


def _ours(error: BaseException) -> WeightlessError | None:
    return error if isinstance(error, WeightlessError) else None


def _memory(error: BaseException, stage: str | None) -> WeightlessError | None:
    """Memory and disk failures, also where a library or a back end wrapped them; our own precise errors win."""
    if isinstance(error, WeightlessError) and type(error) is not InternalError:
        return None
    for cause in _chain(error):
        text = str(cause)
        if any(sign in text for sign in _GPU):
            return GpuOutOfMemory(f"the GPU ran out of memory while {stage}", stage=stage)
        if isinstance(cause, MemoryError) or any(sign in text for sign in _HOST):
            return HostOutOfMemory(f"the host ran out of memory while {stage}", stage=stage)
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return HostOutOfMemory(f"the host ran out of memory while {stage}", stage=stage)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the exporter's scratch disk is full while {stage}", stage=stage)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
