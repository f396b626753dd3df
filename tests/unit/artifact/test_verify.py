"""Verify: each kind of damage is found and called by its own name; nothing is written anywhere."""

from __future__ import annotations

import tracemalloc

import pytest

from exporter.artifact.location import StoreOrigin
from exporter.artifact.transfer import Limits
from exporter.artifact.verify import FileCheck, verify
from exporter.contract.errors import Forbidden, NotFound, StoreUnavailable
from exporter.contract.manifest import Manifest

from .conftest import Export, make_export

SMALL = Limits(parallel=3, block=16 * 1024)


def check(export: Export, name: str = "model.ptd") -> FileCheck:
    found = verify(export.manifest, export.origin, limits=SMALL)
    others = [item for item in found if item.name != name]
    assert all(item.ok for item in others), others
    return next(item for item in found if item.name == name)


def test_what_was_stored_is_good(export: Export) -> None:
    assert check(export).ok
    assert check(export).regions > len(export.manifest.data[0].segments)


def test_six_kinds_of_damage_have_six_names() -> None:
    sizes = [50_000, 60_000, 70_000, 80_000]
    sentences = []

    def spoilt(change: object) -> FileCheck:
        export = make_export(sizes)
        data = bytearray(export.bytes_of("model.ptd"))
        assert callable(change)
        export.spoil("model.ptd", bytes(change(data)))
        return check(export)

    def zeroed(data: bytearray) -> bytearray:
        data[len(data) // 3 : 2 * len(data) // 3] = bytes(2 * len(data) // 3 - len(data) // 3)
        return data

    def flipped(data: bytearray) -> bytearray:
        for at in range(60_000, 60_064):
            data[at] ^= 0x55
        return data

    absent = make_export(sizes)
    absent.store.delete(absent.keys["model.ptd"])
    found = {
        "is not stored": check(absent),
        "is empty": spoilt(lambda data: b""),
        "is cut short": spoilt(lambda data: data[:-1]),
        "was zeroed": spoilt(zeroed),
        "was altered": spoilt(flipped),
        "is another file": spoilt(lambda data: make_export(sizes, seed=4).bytes_of("model.ptd")),
    }
    for words, report in found.items():
        assert not report.ok
        assert words in report.problems[0]
        assert not any(other in report.problems[0] for other in found if other != words)
        sentences.append(report.problems[0])
    assert len(set(sentences)) == 6


def test_the_damaged_tensor_is_named(export: Export) -> None:
    data = bytearray(export.bytes_of("model.ptd"))
    segment = export.manifest.data[0].segments[3]
    data[export.manifest.data[0].segment_base_offset + segment.offset + 70_000] ^= 1
    export.spoil("model.ptd", bytes(data))
    report = check(export)
    assert "segment 3 (w.3)" in report.problems[0]
    assert (report.bad_regions, report.bad_bytes) == (1, 70_001)


@pytest.mark.parametrize("name", ["model.pte", "tokenizer.json"])
def test_other_files_are_checked_too(export: Export, name: str) -> None:
    export.spoil(name, b"y" * len(export.bytes_of(name)))
    assert "was altered" in check(export, name).problems[0]


def test_bytes_in_a_gap_are_found(export: Export) -> None:
    data = bytearray(export.bytes_of("model.ptd"))
    data[4095] = 7
    export.spoil("model.ptd", bytes(data))
    assert "the gap before segment 0" in check(export).problems[0]


def test_a_wrong_crc_is_found(export: Export) -> None:
    export.store.crcs[export.keys["model.ptd"]] = "AAAAAAAAAAA="
    assert "its store says AAAAAAAAAAA=" in check(export).problems[0]


def test_a_header_that_lists_other_segments_is_found(export: Export) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    entry = raw["data"][0]
    whole = export.bytes_of("model.ptd")
    base = entry["segmentBaseOffset"]
    first = entry["segments"][0]
    # A manifest that is right about every byte and wrong about what the runtime will make of them.
    half = first["size"] // 2
    from exporter.contract.manifest import digest

    start = base + first["offset"]
    entry["segments"][0:1] = [
        {**first, "size": half, "digest": digest(whole[start : start + half])},
        {
            "offset": half,
            "size": first["size"] - half,
            "digest": digest(whole[start + half : start + first["size"]]),
            "names": [{"key": "x"}],
        },
    ]
    found = verify(Manifest.model_validate(raw), export.origin, limits=SMALL)
    assert "are not the manifest's" in next(item for item in found if item.name == "model.ptd").problems[0]


def test_faults_of_the_store_are_errors_and_not_findings(export: Export) -> None:
    def fault(key: str, offset: int) -> None:
        raise StoreUnavailable("503")

    export.store.before_read = fault
    with pytest.raises(StoreUnavailable):
        verify(export.manifest, export.origin)


def test_foreign_urls_are_refused(export: Export) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["program"]["urls"] = ["s3://elsewhere/x"]
    with pytest.raises(Forbidden):
        verify(Manifest.model_validate(raw), export.origin)


def test_memory_stays_within_the_bound() -> None:
    limits = Limits(parallel=4, block=256 * 1024)
    export = make_export([24 * 2**20])
    verify(export.manifest, export.origin, limits=limits)
    tracemalloc.start()
    assert all(item.ok for item in verify(export.manifest, export.origin, limits=limits))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The shelf copies each block that it is asked for, so a block counts twice here.
    assert peak < 2 * limits.buffer_bytes + 2**20


def test_a_pulled_manifest_whose_urls_lead_out_of_its_folder(export: Export) -> None:
    """In a store the data file is at ../../weights/…; beside a pulled manifest it is a sibling, or missing."""
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = [f"../../{export.keys['model.ptd']}"]
    manifest = Manifest.model_validate(raw)
    for name, key in export.keys.items():
        export.store.objects[name] = export.store.objects[key]
    pulled = StoreOrigin(export.store, "", siblings=True)
    assert all(item.ok for item in verify(manifest, pulled, limits=SMALL))
    del export.store.objects["model.ptd"]
    with pytest.raises(NotFound, match=r"model\.ptd is not stored"):
        pulled.locate("model.ptd", manifest.data[0].urls)
