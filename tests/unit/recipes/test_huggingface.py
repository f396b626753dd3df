"""The recipe `huggingface`: from a folder or a bucket to a captured program and its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from exporter.check.eager import eager_cases
from exporter.contract.errors import InvalidRequest, SourceNotFound, UnsupportedModel
from exporter.contract.spec import SourcePolicy, Target
from exporter.recipes.checkpoint import model_class, read_config
from exporter.recipes.huggingface import HuggingFaceOptions, HuggingFaceRecipe
from exporter.recipes.registry import RECIPES, find_recipe, parse_options
from exporter.source.captured import Captured
from exporter.source.ports import SourceTree
from exporter.source.resolve import resolve

XNNPACK = Target(backend="xnnpack")
CUDA = Target(backend="cuda")


class Bucket:
    """A bucket in memory, counting the bytes that are read of each object."""

    def __init__(self, folder: Path) -> None:
        self.objects = {f"models/tiny/{path.name}": path.read_bytes() for path in folder.iterdir()}
        self.read_bytes = dict.fromkeys(self.objects, 0)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter([(key, len(body)) for key, body in self.objects.items() if key.startswith(prefix)])

    def size(self, key: str) -> int:
        if key not in self.objects:
            raise SourceNotFound(f"no {key}")
        return len(self.objects[key])

    def read(self, key: str, offset: int, length: int) -> bytes:
        self.read_bytes[key] += length
        return self.objects[key][offset : offset + length]


def no_bucket(name: str) -> Any:
    raise AssertionError(name)


def local(folder: Path) -> SourceTree:
    return resolve(str(folder), SourcePolicy(roots=(str(folder),)), no_bucket)


def save_model(folder: Path, kind: Any, config: Any) -> torch.nn.Module:
    """A model with a fixed seed, saved as a folder; ties are left out, as `transformers` does."""
    torch.manual_seed(9)
    model: torch.nn.Module = kind(config).eval()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors")
    config.architectures = [kind.__name__]
    (folder / "config.json").write_text(config.to_json_string())
    return model


@pytest.fixture
def gpt(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    """A small Llama with tied embeddings."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return tmp_path, save_model(tmp_path, transformers.LlamaForCausalLM, config)


def captured_outputs(captured: Captured) -> torch.Tensor:
    (case,) = eager_cases(captured)
    output = case.outputs[0]
    assert isinstance(output, torch.Tensor)
    return output


def test_a_causal_model_with_ties_is_captured_as_eager_computes_it(gpt: tuple[Path, torch.nn.Module]) -> None:
    folder, model = gpt
    captured = HuggingFaceRecipe().capture(local(folder), HuggingFaceOptions(sequence_length=8), XNNPACK)
    _, kwargs = captured.samples["forward"]
    assert set(kwargs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        expected = model(**kwargs, use_cache=False).logits
    torch.testing.assert_close(captured_outputs(captured), expected, rtol=1e-5, atol=1e-5)
    infos = captured.weights.tensors()
    tied = [infos[name].identity for name in ("model.embed_tokens.weight", "lm_head.weight") if name in infos]
    assert len(set(tied)) == 1


def test_local_weights_are_mapped(gpt: tuple[Path, torch.nn.Module]) -> None:
    folder, model = gpt
    captured = HuggingFaceRecipe().capture(local(folder), HuggingFaceOptions(sequence_length=8), XNNPACK)
    name = "model.layers.0.mlp.up_proj.weight"
    content = b"".join(captured.weights.chunks(name))
    assert content == model.get_parameter(name).detach().numpy().tobytes()


def test_a_bucket_for_cuda_is_not_read_before_the_stream(gpt: tuple[Path, torch.nn.Module]) -> None:
    folder, model = gpt
    bucket = Bucket(folder)
    tree = resolve("s3://bucket/models/tiny", SourcePolicy(roots=("s3://bucket/models",)), lambda name: bucket)
    captured = HuggingFaceRecipe().capture(tree, HuggingFaceOptions(sequence_length=8), CUDA)
    header = 8 + int.from_bytes(bucket.objects["models/tiny/model.safetensors"][:8], "little")
    assert bucket.read_bytes["models/tiny/model.safetensors"] == header
    name = "model.layers.0.mlp.up_proj.weight"
    assert b"".join(captured.weights.chunks(name)) == model.get_parameter(name).detach().numpy().tobytes()


def test_a_bucket_for_a_back_end_that_packs_is_read(gpt: tuple[Path, torch.nn.Module]) -> None:
    folder, model = gpt
    bucket = Bucket(folder)
    tree = resolve("s3://bucket/models/tiny", SourcePolicy(roots=("s3://bucket",)), lambda name: bucket)
    captured = HuggingFaceRecipe().capture(tree, HuggingFaceOptions(sequence_length=8), XNNPACK)
    _, kwargs = captured.samples["forward"]
    with torch.no_grad():
        expected = model(**kwargs, use_cache=False).logits
    torch.testing.assert_close(captured_outputs(captured), expected, rtol=1e-5, atol=1e-5)


def test_an_image_model(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    save_model(tmp_path, transformers.ViTForImageClassification, config)
    captured = HuggingFaceRecipe().capture(local(tmp_path), HuggingFaceOptions(), XNNPACK)
    assert captured_outputs(captured).shape == (1, 3)


def test_the_task_chooses_the_class(gpt: tuple[Path, torch.nn.Module]) -> None:
    config = read_config(local(gpt[0]))
    assert model_class(config, "auto") is transformers.LlamaForCausalLM
    assert model_class(config, "feature-extraction") is transformers.LlamaModel
    with pytest.raises(InvalidRequest, match="fill-mask"):
        model_class(config, "fill-mask")


def test_a_dtype_can_be_asked_for(gpt: tuple[Path, torch.nn.Module]) -> None:
    options = HuggingFaceOptions(sequence_length=8, dtype="bfloat16")
    captured = HuggingFaceRecipe().capture(local(gpt[0]), options, XNNPACK)
    assert {info.dtype for info in captured.weights.tensors().values() if "weight" in info.name} == {"bfloat16"}


def test_kernels_of_elsewhere_are_not_followed(gpt: tuple[Path, torch.nn.Module]) -> None:
    folder = gpt[0]
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "_attn_implementation": "evil/kernel",
        "attn_implementation": "evil/kernel",
        "auto_map": {"AutoModel": "x.Y"},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    captured = HuggingFaceRecipe().capture(local(folder), HuggingFaceOptions(sequence_length=8), XNNPACK)
    assert captured_outputs(captured).shape == (1, 8, 64)


def test_a_model_that_cannot_be_captured(gpt: tuple[Path, torch.nn.Module]) -> None:
    options = HuggingFaceOptions(
        inputs={"input_ids": {"dtype": "int64", "shape": [1, 8], "high": 9}},  # type: ignore[dict-item]
        dynamic=("batch",),
    )
    with pytest.raises(UnsupportedModel, match="batch"):
        HuggingFaceRecipe().capture(local(gpt[0]), options, XNNPACK)


def test_every_recipe_has_an_example_that_its_options_take() -> None:
    assert set(RECIPES) == {"huggingface", "exported-program"}
    for name, recipe in RECIPES.items():
        assert recipe.name == recipe.example["recipe"] == name
        parse_options(recipe, recipe.example["options"])
        Target.model_validate(recipe.example["target"])
        assert recipe.Options.model_json_schema(by_alias=True)["additionalProperties"] is False
    with pytest.raises(InvalidRequest, match="nope"):
        find_recipe("nope")
