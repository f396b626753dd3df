"""What a recipe captures from a source: the meeting point of recipes and lowerings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exporter.contract.segments import Chunk
from exporter.source.ports import WeightSource

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True)
class Captured:
    """What a recipe captured: one exported program per method, and where their weights are.

    `samples` holds example inputs per method, as flat tuples of positional arguments and keyword arguments.
    `weights` reads by the programs' FQNs; a program's own tensors may be mapped or untouched storage.
    `share_buffers` says that mutable buffers of the same name are one buffer for all methods.
    """

    programs: Mapping[str, ExportedProgram]
    weights: WeightSource
    samples: Mapping[str, tuple[tuple[object, ...], Mapping[str, object]]]
    share_buffers: bool = False
    files: Mapping[str, Callable[[], Iterator[Chunk]]] = field(default_factory=dict)
    """Further files for the manifest (tokenizer, configuration): name to a reader of its bytes."""
