"""What is wrong with a request, a source or a model: its own code and hint, and nothing in the store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.conftest import Outcome, save_program

Export = Callable[..., Outcome]


def refused(outcome: Outcome, code: str, *words: str) -> None:
    """The export failed with `code` and a hint, its message has the words, and the store is empty."""
    assert outcome.error is not None
    assert outcome.error.code == code, outcome.error
    assert outcome.error.hint
    for word in words:
        assert word in outcome.error.message
    assert outcome.keys == []
    assert not any(event["type"] == "finished" for event in outcome.events)


@pytest.fixture
def bert_copy(tiny_bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "bert"))


def test_unknown_recipe_and_option(export_here: Export, tiny_bert: Path) -> None:
    refused(export_here("no-such-recipe", tiny_bert, "portable"), "invalid-request", "no-such-recipe")
    outcome = export_here("huggingface", tiny_bert, "portable", options={"sequenceLenght": 16})
    refused(outcome, "invalid-request", "sequenceLenght")
    assert outcome.error is not None
    assert "sequenceLength" in outcome.error.hint


@pytest.mark.parametrize(
    "options",
    [
        {"sequenceLength": 0},
        {"sequenceLength": 41},
        {"dtype": "int8"},
        {"batch": -1},
        {"task": "image-classification"},
        {"inputs": {}},
        {"inputs": {"input_ids": {"dtype": "int64", "shape": [1, 16], "low": 5, "high": 1}}},
        {"inputs": {"input_ids": {"dtype": "int64", "shape": [2147483647, 2147483647]}}},
    ],
)
def test_options_that_do_not_fit(export_here: Export, tiny_bert: Path, options: dict[str, Any]) -> None:
    refused(export_here("huggingface", tiny_bert, "portable", options=options), "invalid-request")


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": {"dtype": "int64", "shape": [1, 16], "low": 500, "high": 900}},
        {"input_ids": {"dtype": "int64", "shape": [1, 64], "high": 100}},
        {"pixel_values": {"dtype": "float32", "shape": [1, 3, 8, 8]}},
        {"input_ids": {"dtype": "float32", "shape": [1, 16]}},
    ],
    ids=["ids out of range", "too long", "another model's", "wrong type"],
)
def test_sample_inputs_that_the_model_does_not_take(
    export_here: Export, tiny_bert: Path, inputs: dict[str, Any]
) -> None:
    outcome = export_here("huggingface", tiny_bert, "portable", options={"inputs": inputs})
    refused(outcome, "invalid-request", "sample inputs")


def test_a_pt2_with_wrong_sample_inputs(export_here: Export, conv_pt2: Path) -> None:
    for inputs in ([{"dtype": "float32", "shape": [2, 4, 32, 32]}], [{"dtype": "float32", "shape": [1]}] * 2):
        refused(export_here("exported-program", conv_pt2, "portable", options={"inputs": inputs}), "invalid-request")


def test_a_missing_source(export_here: Export, tmp_path: Path) -> None:
    outcome = export_here("huggingface", tmp_path / "nothing", "portable", roots=(tmp_path,))
    refused(outcome, "source-not-found")


def test_a_source_outside_of_the_roots(export_here: Export, tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    for source in (
        "file:///etc",
        tmp_path / ".." / "..",
        tmp_path / "link",
        tiny_bert,
        "http://169.254.169.254/latest",
        "hf://owner/name",
    ):
        refused(export_here("huggingface", source, "portable", roots=(tmp_path,)), "source-access-denied")


def test_a_folder_without_weights(export_here: Export, bert_copy: Path) -> None:
    (bert_copy / "model.safetensors").unlink()
    refused(export_here("huggingface", bert_copy, "portable"), "source-not-found", "no weights")


def test_a_folder_without_a_configuration(export_here: Export, bert_copy: Path) -> None:
    (bert_copy / "config.json").unlink()
    refused(export_here("huggingface", bert_copy, "portable"), "source-not-found", "config.json")


def test_pickled_weights(export_here: Export, bert_copy: Path) -> None:
    (bert_copy / "model.safetensors").rename(bert_copy / "pytorch_model.bin")
    refused(export_here("huggingface", bert_copy, "portable"), "source-unsafe", "pytorch_model.bin")


def test_truncated_safetensors(export_here: Export, bert_copy: Path) -> None:
    weights = bert_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(export_here("huggingface", bert_copy, "portable"), "source-unsafe", "model.safetensors")


def test_a_lying_header(export_here: Export, bert_copy: Path) -> None:
    weights = bert_copy / "model.safetensors"
    weights.write_bytes((2**62).to_bytes(8, "little") + weights.read_bytes()[8:])
    refused(export_here("huggingface", bert_copy, "portable"), "source-unsafe", "model.safetensors")


def test_weights_of_another_model(export_here: Export, bert_copy: Path) -> None:
    save_file({"other.weight": torch.zeros(2)}, bert_copy / "model.safetensors")
    refused(export_here("huggingface", bert_copy, "portable"), "source-not-found", "lacks")


def test_weights_of_another_size(export_here: Export, bert_copy: Path) -> None:
    config = json.loads((bert_copy / "config.json").read_text())
    (bert_copy / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    refused(export_here("huggingface", bert_copy, "portable"), "invalid-request", "do not fit")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "made-up"}, "unsupported-model"),
        ({"model_type": ["bert"]}, "unsupported-model"),
        ({"quantization_config": {"quant_method": "torchao"}}, "unsupported-model"),
        ({"hidden_size": "large"}, "invalid-request"),
        ({"num_attention_heads": 7}, "invalid-request"),
        ({"vocab_size": 2**70}, "invalid-request"),
        ({"max_position_embeddings": -1}, "invalid-request"),
        ({"architectures": 5}, "invalid-request"),
    ],
)
def test_a_configuration_that_makes_no_model(
    export_here: Export, bert_copy: Path, change: dict[str, Any], code: str
) -> None:
    config = json.loads((bert_copy / "config.json").read_text())
    (bert_copy / "config.json").write_text(json.dumps({**config, **change}))
    refused(export_here("huggingface", bert_copy, "portable"), code)


def test_code_of_the_source_is_never_run(export_here: Export, bert_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (bert_copy / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: ...\n")
    config = json.loads((bert_copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}}
    (bert_copy / "config.json").write_text(json.dumps(config))
    refused(export_here("huggingface", bert_copy, "portable"), "unsupported-model")
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not an archive", b"\x80\x04pickle."])
def test_a_pt2_that_is_not_an_archive(export_here: Export, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt2").write_bytes(content)
    refused(export_here("exported-program", tmp_path / "model.pt2", "portable"), "source-unsafe")


@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
def test_unsupported_operators(export_here: Export, tmp_path: Path, backend: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.special.erfcx(value)

    path = save_program(Model(), (torch.randn(4, 4),), tmp_path / "model.pt2")
    outcome = export_here("exported-program", path, backend)
    refused(outcome, "unsupported-model", "erfcx")
    assert outcome.error is not None
    assert outcome.error.details == {"method": "forward", "operators": ["aten::special_erfcx.out"]}
    assert not any(event["type"] == "upload" for event in outcome.events)
