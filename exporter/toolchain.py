"""Versions of what an export is made with, for the manifest and the machine's report."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version

from exporter.contract.manifest import Toolchain

PACKAGES = ("weightless", "torch", "executorch", "transformers", "triton", "safetensors", "torchao")


def package_version(name: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def toolchain() -> Toolchain:
    """The toolchain of this process. GPU and driver only where there is one."""
    import torch

    gpu = driver = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
        driver = _driver()
    image = os.environ.get("IMAGE_DIGEST", "")
    return Toolchain(
        weightless=package_version("weightless") or "0",
        torch=torch.__version__,
        executorch=package_version("executorch"),
        transformers=package_version("transformers"),
        triton=package_version("triton"),
        cuda=torch.version.cuda,
        gpu=gpu,
        driver=driver,
        python=platform.python_version(),
        image=image if re.fullmatch(r"sha256:[0-9a-f]{64}", image) else None,
    )


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None
    return found.decode() if isinstance(found, bytes) else str(found)
