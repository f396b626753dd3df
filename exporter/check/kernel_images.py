"""The kernel images inside a shared object: which machine code and which PTX a CUDA program carries.

AOTInductor embeds each kernel as a fat binary (multi-arch) or as a bare cubin. A fat binary starts with 0xBA55ED50, its
version, header size and payload size; each entry has its kind (1: PTX, 2: ELF), header size, payload size and, at byte
28, its architecture. A cubin is an ELF file of machine 190 (EM_CUDA) whose flags hold the architecture. Both layouts
are what `cuobjdump` reads; tests/gpu compares with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_FATBIN = struct.pack("<I", 0xBA55ED50)
_ELF = b"\x7fELF\x02\x01"
_EM_CUDA = 190


@dataclass(frozen=True, slots=True, order=True)
class KernelImage:
    """One kind of image for one architecture."""

    kind: Literal["sass", "ptx"]
    arch: str


def kernel_images(library: bytes) -> frozenset[KernelImage]:
    """Every (kind, architecture) among the kernels of a shared object."""
    fat = list(_fat_binaries(library))
    found = {image for start, end in fat for image in _entries(library, start, end)}
    found.update(_cubins(library, fat))
    return frozenset(found)


def uncovered(library: bytes, arch: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `arch` that no image can run on: no machine code of theirs, and no PTX of an older one.

    PTX of sm_90 and later is architecture-specific as Triton writes it (sm_90a) and compiles for nothing newer.
    """
    images = kernel_images(library)
    sass = {image.arch for image in images if image.kind == "sass"}
    ptx = [_number(image.arch) for image in images if image.kind == "ptx"]
    numbers = {_number(name) for name in sass}

    def runs(number: int) -> bool:
        return number in numbers or any(have == number or (have < number and have < 90) for have in ptx)

    return tuple(name for name in arch if not runs(_number(name)))


def _number(arch: str) -> int:
    return int("".join(character for character in arch if character.isdigit()))


def _fat_binaries(library: bytes) -> Iterator[tuple[int, int]]:
    at = library.find(_FATBIN)
    while at >= 0:
        if at + 16 <= len(library):
            _version, header, size = struct.unpack_from("<HHQ", library, at + 4)
            if header == 16 and 0 < size <= len(library) - at - 16:
                yield at + 16, at + 16 + size
        at = library.find(_FATBIN, at + 4)


def _entries(library: bytes, start: int, end: int) -> Iterator[KernelImage]:
    while start + 64 <= end:
        kind, _version, header, size = struct.unpack_from("<HHIQ", library, start)
        (arch,) = struct.unpack_from("<I", library, start + 28)
        if kind not in (1, 2) or not 32 <= header <= 4096 or not 0 < arch < 1000:
            return
        yield KernelImage("ptx" if kind == 1 else "sass", f"sm_{arch}")
        start += header + size


def _cubins(library: bytes, fat: list[tuple[int, int]]) -> Iterator[KernelImage]:
    at = library.find(_ELF, 1)
    while at >= 0:
        inside = any(start <= at < end for start, end in fat)
        if not inside and at + 64 <= len(library) and struct.unpack_from("<H", library, at + 18)[0] == _EM_CUDA:
            abi = library[at + 8]
            (flags,) = struct.unpack_from("<I", library, at + 48)
            # The low byte until ELF ABI version 7, the second byte since (CUDA 13).
            number = (flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF
            yield KernelImage("sass", f"sm_{number}")
        at = library.find(_ELF, at + 4)
