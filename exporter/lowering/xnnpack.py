"""The XNNPACK back end: fp32 CPU kernels; what XNNPACK does not take runs on ExecuTorch's portable kernels."""

from __future__ import annotations

from typing import Any

from exporter.lowering.cpu import CpuBackend, CpuLowering


def xnnpack_lowering() -> CpuLowering:
    """The XNNPACK back end. Keys of packed weights are SHA-256 hashes of their bytes: layout `flat-tensor/content`."""
    return CpuLowering(CpuBackend("xnnpack", "flat-tensor/content", _partitioners))


def _partitioners() -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return [XnnpackPartitioner()]
