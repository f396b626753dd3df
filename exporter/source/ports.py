"""What sources need from others, and what they offer: ranged reads of files, and weights by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from exporter.contract.segments import Chunk


class RangeReader(Protocol):
    """Random access to one file or object. Reads are safe from several threads."""

    @property
    def size(self) -> int:
        """Bytes of the whole file; fixed when it was opened."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. `SourceUnsafe` past the end, `SourceNotFound` if the file went away."""

    def chunks(self, offset: int, length: int, chunk_size: int) -> Iterator[Chunk]:
        """The same bytes in pieces of at most `chunk_size`, the page cache behind them dropped."""

    def close(self) -> None:
        """Give the descriptor or connection back."""


class SourceTree(Protocol):
    """The files of one resolved, confined and pinned source."""

    @property
    def uri(self) -> str:
        """The source as the manifest names it: no credential, no server path beyond what the user gave."""

    @property
    def revision(self) -> str | None:
        """The pinned revision (40 hex digits for a hub), None where there is none."""

    def files(self) -> Mapping[str, int]:
        """Relative POSIX names and sizes of the regular files. A single file is listed under its own name."""

    def open(self, name: str) -> RangeReader:
        """Open one file of `files()`."""

    def local_path(self, name: str) -> str | None:
        """A path of this machine for a library that needs one (configuration, tokenizer); None where it is remote."""


class ObjectReads(Protocol):
    """Reads of an object store that an ``s3://`` source needs; `exporter.store` satisfies it."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes under `prefix`."""

    def size(self, key: str) -> int:
        """Bytes of one object; `SourceNotFound` where there is none."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of an object."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One weight: torch's dtype name, shape and strides in elements, offset in its storage, dense size in bytes.

    `identity` is equal for two names that share the same bytes of the same storage (ties); None where unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    nbytes: int
    identity: object = None


class WeightSource(Protocol):
    """Weights by fully qualified name of the captured program, read in ranges, never whole."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight that the source can give, by FQN."""

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The tensor's bytes, `nbytes` in all, in the order of a dense tensor with the same dimension order
        (`torch.empty_like` under preserve_format), each chunk at most `MAX_CHUNK` bytes. May be called again."""
