"""A transformers model from the files of a source: configuration read as data, weights mapped, no code of the source.

The model is built on the meta device and given the checkpoint's tensors as they are (renamed and tied by transformers'
own rules). Those of a local source are maps of the file, so that nothing is resident until a back end reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from exporter.contract.segments import Chunk
from exporter.source.module import ModuleWeights, fill
from exporter.source.ports import SourceTree, TensorInfo, WeightSource
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


def load_model(tree: SourceTree, config: Any, kind: Any, dtype: str, *, values: bool) -> tuple[Any, WeightSource]:
    """The model, and its weights by FQN. Local weights are mapped.

    A remote source's are read into memory where `values` are needed (a back end that packs them) or where transformers
    changes them on the way; else they keep storage that nobody writes, and their bytes are read by range.
    `SourceUnsafe` for weights that are not sound, `SourceNotFound` for ones that do not cover the model,
    `InvalidRequest` for ones of another shape.
    """
    stored = SafetensorsWeights(tree)
    state = {name: stored.tensor(name) for name in stored.tensors()}
    if all(tree.local_path(name) for name in tree.files()):
        model = _with_weights(config, kind, dtype, state)
        return model, ModuleWeights(_tensors(model), stored.maps)
    if not values:
        model = _with_weights(config, kind, dtype, state)
        named = _names_by_storage(model, state)
        if named is not None:
            rest = {name: tensor for name, tensor in _tensors(model).items() if name not in named}
            return model, RenamedWeights(stored, named, ModuleWeights(rest))
    fill(state, stored)
    model = _with_weights(config, kind, dtype, state)
    return model, ModuleWeights(_tensors(model))


class RenamedWeights:
    """Weights of a checkpoint under the names of a module, and some of the module's own. Satisfies `WeightSource`."""

    def __init__(self, stored: WeightSource, names: Mapping[str, str], own: WeightSource) -> None:
        """`names` maps a module's FQN to the checkpoint's name."""
        self._stored = stored
        self._names = dict(names)
        self._own = own
        infos = stored.tensors()
        self._infos = {fqn: replace(infos[name], name=fqn) for fqn, name in names.items()} | dict(own.tensors())

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by the module's name."""
        return self._infos

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The tensor's bytes, from the checkpoint or from the module."""
        return self._stored.chunks(self._names[name]) if name in self._names else self._own.chunks(name)


def _names_by_storage(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """Checkpoint names of a module's tensors, found by their storage; None if a parameter is not as it was stored."""
    places = {tensor.data_ptr(): name for name, tensor in state.items() if tensor.numel()}
    named = {}
    for fqn, tensor in _tensors(model).items():
        name = places.get(tensor.data_ptr())
        if name is not None and (tensor.shape, tensor.stride(), tensor.dtype) == (
            state[name].shape,
            state[name].stride(),
            state[name].dtype,
        ):
            named[fqn] = name
        elif isinstance(tensor, torch.nn.Parameter) and tensor.numel():
            return None
    return named


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _with_weights(config: Any, kind: Any, dtype: str, state: dict[str, torch.Tensor]) -> Any:
    """The model, built on the meta device and given the tensors of `state`; frozen, in evaluation mode."""
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
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
    return model.eval().requires_grad_(False)
