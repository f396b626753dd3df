"""What a `.ptd`'s own header says, held against the manifest."""

from __future__ import annotations

from collections import Counter

from exporter.artifact.ports import Blob
from exporter.artifact.regions import Region, data_regions, file_regions
from exporter.contract.errors import VerificationFailed
from exporter.contract.manifest import Data, File
from exporter.stream.ptd import PtdHeader, read_header


def regions_of(entry: File | Data, blob: Blob) -> list[Region]:
    """The regions of a file of the manifest; reads a `.ptd`'s header where the manifest does not give its size."""
    if isinstance(entry, File):
        return file_regions(entry)
    size = entry.header_size if entry.header_size is not None else header_of(blob).header_size
    return data_regions(entry, size)


def header_of(blob: Blob) -> PtdHeader:
    """The header of a `.ptd`, bounds-checked; only its bytes are read."""

    def read(offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        blob.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    return read_header(read, blob.size)


def check_header(data: Data, blob: Blob) -> None:
    """`VerificationFailed` where the header puts segments or names elsewhere than the manifest does."""
    header = header_of(blob)
    if data.segments and header.segment_base_offset != data.segment_base_offset:
        raise VerificationFailed(
            f"{data.name}: its header puts the first segment at {header.segment_base_offset}, "
            f"the manifest at {data.segment_base_offset}",
            file=data.name,
        )
    stated = Counter((segment.offset, segment.size) for segment in data.segments)
    found = Counter((segment.offset, segment.size) for segment in header.segments)
    if stated != found:
        raise VerificationFailed(
            f"{data.name}: its header lists {len(header.segments)} segments that are not the manifest's "
            f"{len(data.segments)}",
            file=data.name,
        )
