"""What a target may ask of this machine, and the errors of a compile."""

from __future__ import annotations

import struct

import pytest
import torch

from exporter.check.kernel_images import KernelImage, kernel_images, uncovered
from exporter.contract.errors import GpuOutOfMemory, InternalError, ToolchainMismatch, UnsupportedModel
from exporter.contract.spec import Target
from exporter.lowering import cuda_target
from exporter.lowering.cuda import _classified
from exporter.lowering.cuda_target import check_arch, check_target, compile_specs

pytest.importorskip("triton", reason="the CUDA back end imports triton")
pytestmark = pytest.mark.filterwarnings("ignore")
CUDA = Target(backend="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_target_is_refused() -> None:
    with pytest.raises(ToolchainMismatch, match="no GPU"):
        check_target(CUDA)


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        (("sm_90",), (9, 0), True),
        (("sm_80",), (9, 0), False),
        (("sm_100",), (9, 0), False),
        (("sm_80", "sm_90"), (8, 0), True),
        (("sm_90a",), (8, 0), False),
        ((), (9, 0), True),
    ],
)
def test_arch(arch: tuple[str, ...], capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_target, "multi_arch", lambda: True)
    if fits:
        check_arch(arch, capability)
    else:
        with pytest.raises(ToolchainMismatch, match="cannot be built"):
            check_arch(arch, capability)


def test_multi_arch_asked_for_and_off_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for CUDA before 12.9: detection throws without a GPU, and upstream then switches it off silently."""
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    with pytest.raises(ToolchainMismatch, match="multi-arch"):
        check_arch(("sm_90",), (9, 0))


def test_specs_say_only_what_differs_from_upstream() -> None:
    def keys(target: Target) -> dict[str, bytes]:
        return {spec.key: spec.value for spec in compile_specs(target, "forward")}

    assert keys(Target(backend="cuda", max_autotune=True)) == {"method_name": b"forward", "low_memory_mode": b"ON"}
    assert keys(Target(backend="cuda", max_autotune=True, low_memory_mode=False)) == {"method_name": b"forward"}
    changed = keys(Target(backend="cuda", max_autotune=False, triton_kernel_mode="off", platform="windows"))
    assert changed["max_autotune"] == b"OFF"
    assert changed["triton_kernel_mode"] == b"OFF"
    assert changed["platform"] == b"windows"


def test_windows_without_shims_gives_upstreams_reason() -> None:
    with pytest.raises(ToolchainMismatch, match=r"aoti_cuda_shims\.lib"):
        cuda_target._check_options(Target(backend="cuda", platform="windows"))


def test_errors_of_a_compile_are_classified() -> None:
    missing = RuntimeError("Method decode missing fallback kernels (1 total):\n  - at::_ops::topk::call\nPlease add")
    error = _classified(missing, CUDA)
    assert isinstance(error, UnsupportedModel)
    assert error.details["method"] == "decode"
    assert error.details["operators"] == ["at::_ops::topk::call"]
    no_choice = RuntimeError("NoValidChoicesError: No choices to select.")
    assert isinstance(_classified(no_choice, CUDA), UnsupportedModel)
    limited = Target(backend="cuda", shared_memory_bytes=64)
    assert isinstance(_classified(no_choice, limited), ToolchainMismatch)
    assert isinstance(_classified(RuntimeError("CUDA error: out of memory"), CUDA), GpuOutOfMemory)
    assert isinstance(_classified(RuntimeError("anything"), CUDA), InternalError)


def fat_binary(*entries: tuple[int, int]) -> bytes:
    body = b""
    for kind, arch in entries:
        head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 8, 0, 0, 0, 9, arch)
        body += head.ljust(64, b"\0") + b"imagedat"
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_kernel_images_of_fat_binaries() -> None:
    library = b"\x7fELF\x02\x01" + bytes(90) + fat_binary((2, 90), (1, 90)) + bytes(13) + fat_binary((2, 80))
    assert kernel_images(library) == {
        KernelImage("sass", "sm_90"),
        KernelImage("ptx", "sm_90"),
        KernelImage("sass", "sm_80"),
    }
    assert uncovered(library, ("sm_90", "sm_80")) == ()
    assert uncovered(library, ("sm_100",)) == ("sm_100",)
    assert uncovered(fat_binary((1, 80)), ("sm_86", "sm_75")) == ("sm_75",)
    assert kernel_images(b"\x50\xed\x55\xba" + b"\xff" * 40) == frozenset()
