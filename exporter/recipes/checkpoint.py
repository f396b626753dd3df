"""A transformers model from the files of a source: configuration read as data, weights mapped, no code of the source.

The model is built on the meta device and given the checkpoint's tensors as they are (renamed and tied by transformers'
own rules). Those of a local source are maps of the file, so that nothing is resident until a back end reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from exporter.contract.errors import (
    InvalidRequest,
    SourceNotFound,
    SourceUnsafe,
    UnsupportedModel,
    WeightlessError,
    first_line,
)
from exporter.source.module import ModuleWeights, fill
from exporter.source.ports import SourceTree
from exporter.source.safetensors import SafetensorsWeights, strict_json

CONFIG = "config.json"
MAX_CONFIG = 16 * 2**20
TASKS = {
    "feature-extraction": "AutoModel",
    "text-generation": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
}
_IGNORED = ("auto_map", "custom_pipelines", "_attn_implementation", "attn_implementation", "_name_or_path")
"""Keys that name code or kernels of elsewhere."""


def read_config(tree: SourceTree) -> Any:
    """The model's configuration. `SourceNotFound` without one, `UnsupportedModel` for an unknown type."""
    files = tree.files()
    if CONFIG not in files:
        raise SourceNotFound(
            f"the source has no {CONFIG}", hint="A transformers model is a folder with config.json and safetensors."
        )
    if files[CONFIG] > MAX_CONFIG:
        raise SourceUnsafe(f"{CONFIG} has {files[CONFIG]} bytes; the limit is {MAX_CONFIG}")
    reader = tree.open(CONFIG)
    try:
        raw = strict_json(reader.read(0, reader.size), CONFIG)
    finally:
        reader.close()
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} does not know the model type {str(kind)[:80]!r}",
            hint="Code of a model's own repository is never run; export the model with torch.export.save instead.",
            method="forward",
        )
    if raw.get("quantization_config"):
        raise UnsupportedModel(
            "the checkpoint is quantized already", hint="Export the unquantized weights.", method="forward"
        )
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict({k: v for k, v in raw.items() if k not in _IGNORED})
    except Exception as error:
        raise InvalidRequest(f"{CONFIG} does not describe a {kind} model: {first_line(error)}") from error


def model_class(config: Any, task: str) -> Any:
    """The class of transformers for the configuration: its own first architecture, or the one for `task`."""
    if task != "auto":
        mapping = getattr(transformers, TASKS[task])._model_mapping
        if type(config) not in mapping:
            raise InvalidRequest(f"a {config.model_type} model cannot do {task}", hint="Leave out the option `task`.")
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    for name in config.architectures or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return model_class(config, "feature-extraction")


def load_model(tree: SourceTree, config: Any, kind: Any, dtype: str) -> tuple[torch.nn.Module, ModuleWeights]:
    """The model with its weights mapped (a remote source's are read into memory), and the weights by FQN.

    `SourceUnsafe` for weights that are not sound, `SourceNotFound` for ones that do not cover the model,
    `InvalidRequest` for ones of another shape.
    """
    stored = SafetensorsWeights(tree)
    state = {name: stored.tensor(name) for name in stored.tensors()}
    remote = any(not tree.local_path(name) for name in tree.files() if name.endswith(".safetensors"))
    if remote:
        fill(state, stored)
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            attn_implementation="sdpa" if kind._supports_sdpa else "eager",
            local_files_only=True,
            trust_remote_code=False,
        )
    except (WeightlessError, MemoryError):
        raise
    except Exception as error:
        raise InvalidRequest(
            f"the weights do not fit the configuration: {first_line(error)}",
            hint="config.json and the safetensors files must come from the same model.",
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SourceNotFound(
            f"the source lacks {len(missing)} weights of {kind.__name__}, such as {missing[0]}",
            hint="Choose the task that the checkpoint was trained for, or the right checkpoint.",
            missing=missing[:50],
        )
    model.eval()
    model.requires_grad_(False)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return model, ModuleWeights(tensors, () if remote else stored.maps)
