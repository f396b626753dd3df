"""The portable back end: ExecuTorch's own reference kernels, no delegate. Keys are FQNs."""

from __future__ import annotations

from exporter.lowering.cpu import CpuBackend, CpuLowering


def portable_lowering() -> CpuLowering:
    """The portable back end; layout `flat-tensor/fqn`."""
    return CpuLowering(CpuBackend("portable", "flat-tensor/fqn", list))
