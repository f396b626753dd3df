"""Inspect: heads only, and nothing believed that the file cannot hold."""

from __future__ import annotations

import base64
import contextlib
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.artifact.flatbuffer import Budget, Table
from exporter.artifact.inspect import inspect
from exporter.artifact.location import StoredBlob, split_uri, stored_blob
from exporter.artifact.pte import read_pte
from exporter.contract.errors import InvalidRequest, VerificationFailed
from exporter.store.local import LocalStore

from .conftest import EXPORT, Export, Shelf

PROGRAM = zlib.decompress(
    base64.b64decode(
        "eNrVV2tsFFUUvrMvlu3SLm0pG1plWzEppJp9dbsL3ZlCQBGMQUFoU0q7uzOlC2Vb2i0giFYJiEEqNqBIhJBQESNoAaFK2ZmYIhRD"
        "CAgoRpBHIJHHjybgg+d67syd3dvSGE3qD6c5nbn3nvOd1733nC1GCE2a4XAKNXa7Db7zjUh+msl7nUF5Z6Ic+G+FtwWZEV7UwTee"
        "Qagb6CJQKZMkDYxny1wITbsbj2vJdwmQw+MOuQLekM/tcvCuIrfTIQTwwFMtBIuCHkeg0O3ii9yegK86YBcCQUGoDjq9RYXuUChU"
        "GPAI2J42wNRQmM6Ax1toD/DekJP38iDpKKx2+jwe3udw8gGvI2i38yGH3RcM+kK8p5oXAi5XkdPFe32FLg8f8mLM7gfxOMbToEcf"
        "PF8DNBHIRsYn4vG4haw3G5K8v8J8szqg5o0QLTNI4uhV6YgcQ69bZGS8XsI8agOeypG/slA+GgV25FAZ0cEsglmEsDP1QMeANoLQ"
        "VqAdQHbQWWDo7d80fW98bFYQ7DfD2yznXXn4+/E4MYlJxbmOROoDofkTgIQIr2Da1XwAr5HI47zXNUVRGrwDUSEydqywICjwfDgy"
        "F9UQPqwjBei5SPT5cGO0EvMPTvA3Ni0gtimxNiX8NREdOwlpSY4KiB3WBwo+TmlbXMmtlmANIjqLkzzMn8QedR2RvYDnBsualXlM"
        "0QeJ3DNGch6MRK+BiqWejLWEEIWbQuY0hF9D/PHCx2mYWM0o+8AGZAS6jfMJtATnA+eO6EAPEz7oXwM/MRzJG2NN7BlkOAs2YwFV"
        "FyLn1EJwJidxtLMBp5Qa18K4+6GyL5DGIO9j7FecPFdgTdajzwJ92XJWLXLWjXLEsog9mdTbSuzaH1f2Vl+bsOS5pA1MD/DdVG0A"
        "m3RIJ9tdRfYrGmSQ94VBjQs8r8KarEefDhZlyBE2khOdTvRYKVvuAz5OGn38ML4a3wMkvqocia3OHU/GlqHOk+KHCfaPsj/UGFnR"
        "cHnVTE4+HaM+2IZ1GFvTf96MMplhLyn4xA+9hdKA1yxJuxhz4iwhA41novCMBA/TQaDdQOWOAtuyvOgr9ULeWFtesClcGw1HGp+O"
        "NtXXCnkFtrxQXSQqLInixUhTba08VROu5RuESGVjvRCChfKEPOboJaNO9JWoWE5p/RdS8Ac2u5kBtvt/4He/3vLhULSPseUVeX8X"
        "Ovmeq65rWBxo4NF/9Vgvj+asHY1Se8tYbtEeN9fzyWYx9l6Hf4TdJtW+OEJatyaV/ePSImmlpoJrPvcFt9WcwqXZWG7Jd3ekBatK"
        "RffSbKn9wiF2nXebWFk2nd305ULO1fIsd77MUrL4Yhe3+LOKYkvXSGmT4aq4r+msNCEww3/F9yZ3rmeJNOb4UfHw3G2dVQ0bpCPh"
        "qJS7f6h0lV/PPZGpK5lWNlPMuPiLdCb1tP/+wn3+M3dPsrdO/Mh23d9b3H4DSROjQ7nOcg0ndNwSp7etloa0H+HKMo5wNSlh8eiu"
        "PdLk7Wul+PgpsWET5nPf77SKU98ql0pvfCRemHWR3ZQ/imvfvlLaeD1N+nhGvnTpSQd3epSRu/P7FW7QmDc6z9/Llu4taxvXWraP"
        "vf7UiljnlgibVn5LGj2ymX2p7YCYvmyvtLIjV1pUvoIbiByUTrbbH5e7mhJdsjNRHtxPlL5gdyDSd9jke8EM90cmuWty5HvLAlJu"
        "KGb5jFLTMknNUmvuTXwXUzXcKnc7Sg3PpOqI2k8NTJ9oAuuSeqyUnmbKx4HpH02JumKi6g+i+gkN1Uti3m5YiAJ5gXpwT0v6tmLC"
        "U/VQqTX4e55cd5jEva8hpOKqNXw9JTOTkjET3w19+A9R/Kv64df34Z9I6p+S+3SIr0HeD4jsiHTisSrDUL0QXbPe6YNjpXDwjqBx"
        "VFu0fWxpjidtP0xsZ6j4YBkNpd+IUiFeRmSkeiPaBwv5RdOfD3GqR9FRdZLGyyRRUD3BIwuFZaT6PDUOGGsH6Vu9ZNyg+KW1kP4R"
        "260jegyJ3tQEdg6SNZko/bpEj6xLrGmpPvS4gq3JJPNmOL3qiTYTedVGfQKrlx5ZlpFl1d8rZllWlVN7bPs/uHvm+L+JLRz3rr/9"
        "1IeseVZLbI7vbfbo7d1iy8opsT0/MeJvP+jF5bty2WNrKtlvx2+JTf16HmsVDsf0mpOxYWs/EEdyDbFVNzayRZ+PF59pvXZwW1ea"
        "6EpdenBzxrXik++7/amvn/K3PvjKXxdYwf58IF/MLpvn37A0S2z4NJcdkq4VH/Oc8r98eZI42XnIP5xpjf0FjjLm8Q=="
    )
)
"""A program of ExecuTorch 1.5.1: a linear layer and an embedding on XNNPACK, batch up to 16."""


def look(data: bytes) -> tuple[dict[str, Any], int]:
    """What inspect says of `data`, and how many bytes it read."""
    shelf = Shelf(objects={"file": data})
    found = inspect(StoredBlob(shelf, "file", len(data)))
    return found, sum(length for _, _, length in shelf.reads)


def test_a_program() -> None:
    found, _ = look(PROGRAM)
    (method,) = found["methods"]
    assert found["kind"] == "program"
    assert method["name"] == "forward"
    assert method["inputs"] == [
        {"dtype": "float32", "shape": [16, 8], "dynamic": True},
        {"dtype": "int64", "shape": [16], "dynamic": True},
    ]
    assert method["outputs"][1] == {"dtype": "float32", "shape": []}
    assert method["delegates"] == ["XnnpackBackend"]
    assert "aten::embedding.out" in method["operators"]
    assert len(found["segments"]) == 4
    assert all(segment["offset"] + segment["size"] <= len(PROGRAM) for segment in found["segments"])
    assert len(found["namedData"]) == 2


def test_only_the_head_of_a_program_is_read() -> None:
    _, read = look(PROGRAM + bytes(10**6))
    assert read < 3000


def test_a_data_file(export: Export) -> None:
    found, read = look(export.bytes_of("model.ptd"))
    assert found["kind"] == "data"
    assert [segment["size"] for segment in found["segments"]] == [300, 5000, 0, 70_001, 64, 200_000]
    assert found["segments"][3]["names"] == [{"key": "k3"}]
    assert read < 4096


def test_a_manifest(export: Export) -> None:
    found, _ = look(export.content)
    assert found["kind"] == "manifest"
    assert found["manifest"]["export"]["id"] == EXPORT


@pytest.mark.parametrize("data", [b"", b"abc", b"PK\x03\x04" + bytes(100), bytes(1000), b"[1, 2, 3, 4, 5]"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(VerificationFailed):
        look(data)


@pytest.mark.parametrize("size", [8, 40, 63, 64, 500, 2000, 2200, len(PROGRAM) - 1])
def test_a_program_that_is_cut_short(size: int) -> None:
    with pytest.raises(VerificationFailed):
        look(PROGRAM[:size])


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_altered_programs_are_read_or_refused_and_nothing_else(seed: int, changes: int) -> None:
    rng = random.Random(seed)
    data = bytearray(PROGRAM)
    for _ in range(changes):
        at = rng.choice((rng.randrange(len(data)), rng.randrange(64)))
        data[at] = rng.choice((0, 255, 127, rng.randrange(256)))
    with contextlib.suppress(VerificationFailed):
        read_pte(lambda offset, length: bytes(data[offset : offset + length]), len(data))


def test_a_small_file_cannot_ask_for_endless_work() -> None:
    # A vector of a million entries that all point at one table, which holds that same vector.
    count = 1_000_000
    table = struct.pack("<i", 8)
    vector = struct.pack("<I", count) + b"".join(struct.pack("<i", 0) for _ in range(4))
    buffer = struct.pack("<I", 12) + struct.pack("<HHHH", 6, 8, 4, 0) + table + struct.pack("<I", 4) + vector
    with pytest.raises(IndexError):
        Table.root(buffer + bytes(4 * count), Budget(1000, 2**30)).tables(0)


@pytest.mark.parametrize("name", ["m.pte", "sp ace.pte", "100%.pte", "ünï.pte", "a#b?c.pte"])
def test_local_paths_are_taken_as_they_are_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PROGRAM)
    (tmp_path / "link").symlink_to(tmp_path / name)
    for target in (str(tmp_path / name), str(tmp_path / "link"), (tmp_path / name).as_uri()):
        root, key = split_uri(target)
        assert inspect(stored_blob(LocalStore(root), key))["kind"] == "program"


@pytest.mark.parametrize(
    ("target", "root", "key"),
    [
        ("s3://bucket/a/exports/exp_x/manifest.json", "s3://bucket", "a/exports/exp_x/manifest.json"),
        ("s3://bucket/m.json", "s3://bucket", "m.json"),
        ("file:///s/exports/exp_x/manifest.json", "file:///s", "exports/exp_x/manifest.json"),
        ("file:///s/team/exports/exp_x/manifest.json", "file:///s/team", "exports/exp_x/manifest.json"),
        ("file:///s/out/manifest.json", "file:///s/out", "manifest.json"),
        ("/exports/exp_x/manifest.json", "file:///", "exports/exp_x/manifest.json"),
    ],
)
def test_the_store_of_a_uri(target: str, root: str, key: str) -> None:
    assert split_uri(target) == (root, key)


@pytest.mark.parametrize("target", ["s3://bucket", "s3://bucket/", "s3:///x", "file://host/x", "ftp://x/y", "hf://a@b"])
def test_targets_that_name_nothing(target: str) -> None:
    with pytest.raises(InvalidRequest):
        split_uri(target)
