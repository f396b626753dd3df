"""What differs between two exports of a model, from their manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exporter.contract.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Changes:
    """Segments by name; sizes in bytes, times in milliseconds. Differences are new minus old."""

    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    same: int
    program: int
    data: int
    host_peak: int
    gpu_peak: int
    milliseconds: int
    program_is_same: bool


def changes_between(old: Manifest, new: Manifest) -> Changes:
    """The changes from `old` to `new`. Where keys are content hashes, a changed segment is removed and added."""
    before, after = _digests(old), _digests(new)
    return Changes(
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        same=sum(1 for name in after if before.get(name) == after[name]),
        program=new.program.size - old.program.size,
        data=sum(item.size for item in new.data) - sum(item.size for item in old.data),
        host_peak=new.resources.host_peak_anon_bytes - old.resources.host_peak_anon_bytes,
        gpu_peak=new.resources.gpu_peak_bytes - old.resources.gpu_peak_bytes,
        milliseconds=_milliseconds(new) - _milliseconds(old),
        program_is_same=new.program.digest == old.program.digest,
    )


def _digests(manifest: Manifest) -> Mapping[str, str]:
    return {
        f"{data.name}: {segment.names[0].fqn or segment.names[0].key}": segment.digest
        for data in manifest.data
        for segment in data.segments
    }


def _milliseconds(manifest: Manifest) -> int:
    return sum(stage.milliseconds for stage in manifest.resources.stages)
