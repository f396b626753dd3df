"""Recipe `huggingface`: a transformers model, captured by transformers' own exporters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field

from exporter.contract.base import Strict
from exporter.contract.errors import InvalidRequest, UnsupportedModel, WeightlessError, first_line
from exporter.contract.manifest import check_file_name
from exporter.contract.segments import MAX_CHUNK, Chunk
from exporter.contract.spec import Target
from exporter.recipes.samples import TensorInput, config_samples, make_all
from exporter.source.captured import Captured
from exporter.source.ports import SourceTree

METHOD = "forward"
MAX_FILE = 64 * 2**20
"""Largest file, in bytes, that is copied beside the program."""
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files that a consumer needs beside the program."""


class HuggingFaceOptions(Strict):
    """Options of the recipe `huggingface`."""

    task: Literal[
        "auto",
        "feature-extraction",
        "text-generation",
        "text-classification",
        "token-classification",
        "question-answering",
        "fill-mask",
        "image-classification",
    ] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    batch: Annotated[int, Field(ge=1, le=4096)] = 1
    sequence_length: Annotated[int, Field(ge=1, le=2**20)] | None = None
    dynamic: tuple[Literal["batch", "sequence"], ...] = Field(default=(), max_length=2)
    max_batch: Annotated[int, Field(ge=2, le=4096)] = 8
    inputs: Annotated[dict[str, TensorInput], Field(min_length=1, max_length=64)] | None = None


class HuggingFaceRecipe:
    """Captures a folder with `config.json` and safetensors, from disk, a bucket or the hub."""

    name: ClassVar[str] = "huggingface"
    description: ClassVar[str] = "A transformers model: config.json and safetensors in a directory, bucket or hub."
    Options: ClassVar[type[BaseModel]] = HuggingFaceOptions
    example: ClassVar[Mapping[str, Any]] = {
        "recipe": "huggingface",
        "source": "hf://sentence-transformers/all-MiniLM-L6-v2@main",
        "options": {"sequenceLength": 128},
        "target": {"backend": "xnnpack"},
    }

    def availability(self) -> str | None:
        """Why the recipe cannot run here: transformers without its exporters."""
        try:
            exporters: Any = import_module("transformers.exporters.exporter_dynamo")
        except Exception as error:
            return f"transformers' exporters do not import: {type(error).__name__}"
        if not hasattr(exporters.DynamoExporter, "export_program"):
            return "transformers is too old: its exporters have no export_program"
        return None

    def capture(self, tree: SourceTree, options: HuggingFaceOptions, target: Target) -> Captured:
        """One program, `forward`, of the model's forward pass."""
        from exporter.recipes.checkpoint import CONFIG, load_model, model_class, read_config

        config = read_config(tree)
        # torch.export takes a sample size of 1 for a constant.
        batch = max(options.batch, 2) if "batch" in options.dynamic else options.batch
        try:
            kind = model_class(config, options.task)
            given = options.inputs or config_samples(config, kind.main_input_name, batch, options.sequence_length)
        except (WeightlessError, MemoryError):
            raise
        except Exception as error:
            raise InvalidRequest(f"{CONFIG} describes no model with inputs: {first_line(error)}") from error
        model, weights = load_model(tree, config, kind, options.dtype, values=target.backend != "cuda")
        program = _export(model, make_all(given), dynamic_shapes(given, options), target)
        args, kwargs = program.example_inputs or ((), {})
        return Captured(
            programs={METHOD: program},
            weights=weights,
            samples={METHOD: (args, kwargs)},
            files=companion_files(tree),
        )


def dynamic_shapes(given: Mapping[str, TensorInput], options: HuggingFaceOptions) -> dict[str, Any] | None:
    """Per input, dimension 0 as `batch` and dimension 1 as `sequence`, where the options ask for it.

    A sequence may be as long as the sample, a batch as large as `maxBatch`: memory is planned for the upper bound.
    """
    if not options.dynamic:
        return None
    shapes: dict[str, Any] = {}
    batch = torch.export.Dim("batch", min=1, max=max(options.max_batch, options.batch))
    for name, sample in given.items():
        dims: dict[int, Any] = {}
        if "batch" in options.dynamic and sample.shape:
            dims[0] = batch
        if "sequence" in options.dynamic and len(sample.shape) == 2:
            if sample.shape[1] < 2:
                raise InvalidRequest("a dynamic sequence needs a sequenceLength of at least 2")
            dims[1] = torch.export.Dim("sequence", min=2, max=sample.shape[1])
        shapes[name] = dims
    return shapes


def _export(
    model: Any, inputs: dict[str, torch.Tensor], shapes: dict[str, Any] | None, target: Target
) -> torch.export.ExportedProgram:
    exporters: Any = import_module("transformers.exporters.exporter_dynamo")
    settings = exporters.DynamoConfig(
        dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=shapes is not None
    )
    flags = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target.backend != "cuda":
            _patch_for_executorch(stack)
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # the CPU runtime has no grouped matrix product
        try:
            program, _ = exporters.DynamoExporter().export_program(model, {**inputs, **flags}, settings)
        except (WeightlessError, MemoryError):
            raise
        except Exception as error:
            raise _capture_error(model, inputs, error) from error
        if target.backend != "cuda":
            _fix_for_executorch(program)
    assert isinstance(program, torch.export.ExportedProgram)
    return program


def _patch_for_executorch(stack: ExitStack) -> None:
    """transformers' replacements of torch operators that ExecuTorch's CPU back ends do not take."""
    import_module("transformers.exporters.exporter_executorch")  # registers them
    apply_patches: Any = import_module("transformers.exporters.utils").apply_patches
    stack.enter_context(apply_patches("executorch"))
    stack.enter_context(apply_patches("executorch.xnnpack"))


def _fix_for_executorch(program: torch.export.ExportedProgram) -> None:
    fixes: Any = import_module("transformers.exporters.utils")
    fixes.apply_fx_program_fixes("executorch", program)
    fixes.apply_fx_node_fixes("executorch", program.graph_module)


def _capture_error(model: torch.nn.Module, inputs: dict[str, torch.Tensor], error: Exception) -> WeightlessError:
    """Whose fault a failed capture is: the sample's if the model itself does not run on it, else the model's."""
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as eager:
        return InvalidRequest(
            f"the model does not run on its sample inputs: {first_line(eager)}",
            hint="Check the options batch, sequenceLength and inputs against the model.",
        )
    return UnsupportedModel(
        f"torch.export cannot capture the model: {type(error).__name__}: {' '.join(str(error).split())[:600]}",
        hint="The forward pass depends on data in a way that cannot be captured, or not for these dynamic shapes.",
        method=METHOD,
    )


def companion_files(tree: SourceTree) -> dict[str, Callable[[], Iterator[Chunk]]]:
    """Tokenizer and configuration files of a source, read when the manifest is written."""
    return {
        check_file_name(name): partial(_chunks, tree, name)
        for name, size in tree.files().items()
        if name in COMPANIONS and size <= MAX_FILE
    }


def _chunks(tree: SourceTree, name: str) -> Iterator[Chunk]:
    reader = tree.open(name)
    try:
        yield from reader.chunks(0, reader.size, MAX_CHUNK)
    finally:
        reader.close()
