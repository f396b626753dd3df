"""Exports of tiny models end to end: captured, lowered, streamed, read back, run, committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.contract.manifest import digest
from tests.integration.conftest import EXPORT_ID, Outcome

Export = Callable[..., Outcome]
BACKENDS = ("xnnpack", "portable")


def stages(outcome: Outcome) -> list[str]:
    """Stages in the order in which they started."""
    return [
        event["name"]
        for event in outcome.events
        if event["type"] == "stage" and event["state"] == "started" and "method" not in event
    ]


def passed(outcome: Outcome) -> float:
    """The relative error of the one method, which must have passed."""
    assert outcome.error is None, outcome.error
    (check,) = outcome.manifest.verification
    assert (check.status, check.against) == ("passed", "eager")
    assert check.max_relative_error is not None
    return float(check.max_relative_error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["conv_pt2", "transformer_pt2"])
def test_a_pt2_through_both_back_ends(
    export_here: Export, request: pytest.FixtureRequest, model: str, backend: str
) -> None:
    outcome = export_here("exported-program", request.getfixturevalue(model), backend)
    assert passed(outcome) <= 1e-4
    assert stages(outcome) == ["resolving", "capturing", "compiling", "uploading", "committing", "verifying"]
    finished = outcome.events[-1]
    assert finished["type"] == "finished"
    manifest_key = f"exports/{EXPORT_ID}/manifest.json"
    assert finished["manifestUri"] == outcome.store.uri(manifest_key)
    content = outcome.store.read(manifest_key, 0, outcome.store.head(manifest_key).size)
    assert finished["manifestDigest"] == digest(content)
    assert [key for key in outcome.keys if not key.startswith("weights/by-layout/")] == [
        f"exports/{EXPORT_ID}/1/model.pte",
        manifest_key,
        f"weights/{EXPORT_ID}-1/model.ptd",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformers_folder(export_here: Export, tiny_bert: Path, backend: str) -> None:
    outcome = export_here("huggingface", tiny_bert, backend, options={"sequenceLength": 16})
    assert passed(outcome) <= 1e-4
    manifest = outcome.manifest
    assert [item.name for item in manifest.files] == ["config.json", "tokenizer.json"]
    key = f"exports/{EXPORT_ID}/{manifest.files[1].urls[0]}"
    assert outcome.store.read(key, 0, manifest.files[1].size) == (tiny_bert / "tokenizer.json").read_bytes()
    (method,) = manifest.program.methods
    assert [value.shape for value in method.inputs] == [(1, 16), (1, 16)]  # type: ignore[union-attr]
    (data,) = manifest.data
    assert data.layout == ("flat-tensor/content" if backend == "xnnpack" else "flat-tensor/fqn")
    assert manifest.resources.host_peak_anon_bytes > 0
    assert [stage.name for stage in manifest.resources.stages] == stages(outcome)
    assert manifest.toolchain.executorch is not None


def test_dynamic_batch_and_sequence(export_here: Export, tiny_bert: Path) -> None:
    options = {"dynamic": ["batch", "sequence"], "sequenceLength": 16, "maxBatch": 3}
    outcome = export_here("huggingface", tiny_bert, "portable", options=options)
    assert passed(outcome) <= 1e-4
    (method,) = outcome.manifest.program.methods
    assert [value.shape for value in method.inputs] == [(-1, -1), (-1, -1)]  # type: ignore[union-attr]


def test_verification_can_be_left_out_and_says_so(export_here: Export, conv_pt2: Path) -> None:
    outcome = export_here("exported-program", conv_pt2, "portable", verify=False)
    assert outcome.error is None
    (check,) = outcome.manifest.verification
    assert (check.status, check.reason) == ("skipped", "not asked for")


def test_the_same_source_gives_the_same_bytes(export_here: Export, conv_pt2: Path) -> None:
    first, second = (export_here("exported-program", conv_pt2, "xnnpack", verify=False) for _ in range(2))
    assert first.manifest.data[0].segments == second.manifest.data[0].segments
    assert first.manifest.program.digest == second.manifest.program.digest


def test_sample_inputs_can_be_given(export_here: Export, conv_pt2: Path) -> None:
    inputs = [{"dtype": "float32", "shape": [2, 3, 32, 32]}]
    outcome = export_here("exported-program", conv_pt2, "portable", options={"inputs": inputs, "method": "classify"})
    assert passed(outcome) <= 1e-4
    assert outcome.manifest.program.methods[0].name == "classify"
