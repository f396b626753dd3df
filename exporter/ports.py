"""What the pipeline needs of the parts that are built for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from exporter.check.ports import StoredArtifact
from exporter.contract.errors import WeightlessError
from exporter.contract.manifest import Resources, Verification
from exporter.source.captured import Captured
from exporter.stream.ports import ReuseTarget as Store

__all__ = ["Check", "Interruption", "Meter", "Store"]


class Meter(Protocol):
    """Accounts for what each stage takes."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A context manager: what happens inside belongs to the stage."""

    def resources(self) -> Resources:
        """Peaks so far, over the process tree and by stage."""


class Check(Protocol):
    """Runs a stored artifact before it is committed."""

    def prepare(self, captured: Captured) -> None:
        """Take what is needed of the captured programs, before a back end changes them. `InvalidRequest` for samples
        that the model does not take."""

    def verify(self, artifact: StoredArtifact) -> Sequence[Verification]:
        """The outcome per method. `VerificationFailed` where bytes or outputs differ."""


class Interruption(Protocol):
    """Stops the export from outside."""

    def request(self, error: WeightlessError) -> None:
        """Stop the export with `error`; from any thread."""

    def check(self) -> None:
        """Raise if a stop was asked for."""

    def end(self) -> None:
        """The export is committed: nothing stops it any more."""

    def shield(self) -> AbstractContextManager[None]:
        """A context manager: inside, the export is not interrupted."""
