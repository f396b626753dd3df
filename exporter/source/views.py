"""Finds tensors that are small windows on large storages, and one tensor under two kinds of name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from exporter.source.strided import extent

MIN_WASTE = 2**20
"""Bytes of a storage that no tensor uses, below which nothing is said."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a user should know of their weights: a code for machines, a sentence, and the tensors' names."""

    code: str
    message: str
    details: Mapping[str, str | int | bool | list[str] | None]


def find_views(programs: Mapping[str, ExportedProgram]) -> list[Finding]:
    """Findings over all programs, each storage told once.

    `partial-storage`: at least half of a storage, and `MIN_WASTE`, is used by no tensor; a copy of the file that keeps
    whole storages would be larger by the ratio that is named. `duplicate-tensor`: a parameter or buffer that is also a
    constant of the program, as non-strict export makes of a parameter reached through a list. Both are stored once,
    dense.
    """
    storages: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(programs):
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.numel():
            storages.setdefault(storage._cdata, (storage.nbytes(), {}))[1].setdefault(name, tensor)
    found = [_partial(size, named) for size, named in storages.values()]
    found += [_duplicate(programs, named) for _, named in storages.values()]
    return [finding for finding in found if finding is not None]


def _tensors(programs: Mapping[str, ExportedProgram]) -> Iterator[tuple[str, torch.Tensor]]:
    for program in programs.values():
        for table in (program.state_dict, program.constants):
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    yield name, tensor.detach()


def _partial(size: int, named: Mapping[str, torch.Tensor]) -> Finding | None:
    used = _covered([_span(tensor) for tensor in named.values()])
    if size - used < MIN_WASTE or size < 2 * used:
        return None
    names = sorted(named)
    return Finding(
        "partial-storage",
        f"{names[0]} uses {used} of the {size} bytes of its storage (1 in {size // used}); only those are stored.",
        {"tensors": names[:50], "usedBytes": used, "storageBytes": size, "ratio": size // used},
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    return start, start + extent(tensor.shape, tensor.stride()) * item


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes that at least one span covers."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _duplicate(programs: Mapping[str, ExportedProgram], named: Mapping[str, torch.Tensor]) -> Finding | None:
    constants = {name for program in programs.values() for name in program.constants}
    state = {name for program in programs.values() for name in program.state_dict}
    extra = sorted(name for name in named if name in constants - state)
    real = sorted(name for name in named if name in state)
    twins = [name for name in extra if any(_span(named[name]) == _span(named[other]) for other in real)]
    if not twins:
        return None
    return Finding(
        "duplicate-tensor",
        f"{real[0]} is also the constant {twins[0]} of the program; its bytes are stored once.",
        {"tensors": (real + twins)[:50]},
    )
