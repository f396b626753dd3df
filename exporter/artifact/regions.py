"""The runs of bytes that a manifest vouches for: a whole file, or a `.ptd`'s header, segments and gaps of zeros.

Together the regions of a file cover every byte of it, in order, so that a reader who checks each has checked all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from exporter.contract.errors import VerificationFailed
from exporter.contract.manifest import Data, File, SegmentInfo

EMPTY_DIGEST = "sha256:" + hashlib.sha256(b"").hexdigest()
MAX_NAMES = 3
"""Tensor names that a message lists for one segment."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes and its SHA-256; `digest` is None where every byte must be zero."""

    offset: int
    size: int
    digest: str | None
    label: str

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.size


def file_regions(file: File) -> list[Region]:
    """The one region of a file that has a digest of its own."""
    return _without_empty([Region(0, file.size, file.digest, "the file")])


def data_regions(data: Data, header_size: int) -> list[Region]:
    """Header, segments and gaps of a `.ptd`, in file order. `header_size`: bytes that `headerDigest` covers.

    `VerificationFailed` where the manifest's own numbers do not add up.
    """
    if header_size > data.size or (data.segments and header_size > data.segment_base_offset):
        raise VerificationFailed(
            f"{data.name}: its header of {header_size} bytes overlaps what follows", file=data.name
        )
    regions = [Region(0, header_size, data.header_digest, "the header")]
    end = header_size
    for number, segment in enumerate(data.segments):
        start = data.segment_base_offset + segment.offset
        if start > end:
            regions.append(Region(end, start - end, None, f"the gap before segment {number}"))
        regions.append(Region(start, segment.size, segment.digest, segment_label(number, segment)))
        end = start + segment.size
    if end < data.size:
        regions.append(Region(end, data.size - end, None, "the gap at the end"))
    return _without_empty(regions)


def segment_label(number: int, segment: SegmentInfo) -> str:
    """How messages call a segment: its number and its first tensor names."""
    names = [name.fqn or name.key for name in segment.names[:MAX_NAMES]]
    more = len(segment.names) - len(names)
    return f"segment {number} ({', '.join(names)}{f' and {more} more' if more > 0 else ''})"


def _without_empty(regions: Sequence[Region]) -> list[Region]:
    for region in regions:
        if region.size == 0 and region.digest not in (None, EMPTY_DIGEST):
            raise VerificationFailed(f"{region.label} has no bytes, yet the manifest gives it the digest of some")
    return [region for region in regions if region.size]
