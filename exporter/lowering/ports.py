"""What a lowering takes and gives. A back end turns captured programs into a `.pte` and the segments of its `.ptd`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exporter.contract.events import StageName
from exporter.contract.manifest import Method
from exporter.contract.segments import Chunk, Segment
from exporter.source.captured import Captured


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments known before the compile, in first-use order; `name` is the data file's.

    Empty for back ends that pack weights themselves: everything then comes with `Lowered.appended`.
    """

    name: str
    layout: str
    segments: Sequence[Segment] = ()
    reserve: int = 0
    """Bytes that compiler-made segments may add at most, for the part plan."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """The compiled program: chunks of the `.pte` file, its methods, and the segments that the compiler made.

    `used` maps each planned segment's first key to the keys that the program asks for; a planned segment that is not in
    it is stored under ``unused:{fqn}``. None means that every planned name is used as planned.
    """

    program: Callable[[], Iterator[Chunk]]
    program_size: int
    methods: Sequence[Method]
    appended: Sequence[Segment] = ()
    used: Mapping[str, Sequence[str]] | None = None
    needs_data: bool = True
    details: Mapping[str, str | int] = field(default_factory=dict)


class Progress(Protocol):
    """How a lowering reports: `step(stage, method, done, total)`, with methods counted."""

    def step(self, stage: StageName, method: str, done: int, total: int) -> None:
        """`done` of `total` methods are through `stage`; `method` is the one at work."""


class Lowering(Protocol):
    """One back end."""

    def preflight(self, captured: Captured) -> None:
        """Refuse what cannot be lowered before anything costly: `UnsupportedModel` names method and operators."""

    def plan(self, captured: Captured) -> Plan:
        """The segments that can be sent while `lower` runs."""

    def lower(self, captured: Captured, progress: Progress) -> Lowered:
        """Compile. `UnsupportedModel`, `GpuOutOfMemory`, `HostOutOfMemory`, `ToolchainMismatch` or `InternalError`."""
