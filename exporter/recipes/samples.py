"""Sample inputs: made from a model's configuration, or from a list of dtypes and shapes. Seeded, so always the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from exporter.contract.base import Strict
from exporter.contract.errors import InvalidRequest

SEED = 20260
MAX_SAMPLE_BYTES = 2**30
"""Bytes that one sample tensor may have."""
Dim = Annotated[int, Field(ge=1, le=2**31)]


class TensorInput(Strict):
    """A sample tensor: uniform integers in [low, high], or normal numbers for a floating dtype."""

    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: tuple[Dim, ...] = Field(max_length=8)
    low: int = Field(default=0, ge=-(2**53), le=2**53)
    high: int = Field(default=1, ge=-(2**53), le=2**53)

    @model_validator(mode="after")
    def _ordered(self) -> TensorInput:
        if self.low > self.high:
            raise ValueError("low is greater than high")
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            lowest, highest = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            if self.low < lowest or self.high > highest:
                raise ValueError(f"low and high lie outside of {self.dtype}")
        size = torch.Size(self.shape).numel() * dtype.itemsize
        if size > MAX_SAMPLE_BYTES:
            raise ValueError(f"a sample tensor of {size} bytes is too large (limit {MAX_SAMPLE_BYTES})")
        return self

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """The tensor, on the CPU."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(self.shape, generator=generator).to(dtype)
        return torch.randint(self.low, self.high + 1, self.shape, generator=generator).to(dtype)


def generator() -> torch.Generator:
    """A generator with the fixed seed."""
    return torch.Generator().manual_seed(SEED)


def config_samples(config: Any, main_input: str, batch: int, sequence: int | None) -> dict[str, TensorInput]:
    """Inputs for a transformers model by what its main input is called. `InvalidRequest` where that is not foreseen."""
    if main_input == "input_ids":
        return _text_samples(config, batch, sequence)
    if main_input == "pixel_values":
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", None) or 3
        return {main_input: TensorInput(dtype="float32", shape=(batch, channels, height, width))}
    raise InvalidRequest(
        f"no sample inputs are known for a model whose main input is {main_input}",
        hint="Give the option `inputs`: {name: {dtype, shape}} for each argument of the model.",
    )


def _text_samples(config: Any, batch: int, sequence: int | None) -> dict[str, TensorInput]:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    length = sequence if sequence is not None else min(128, limit or 128)
    if limit is not None and length > limit:
        raise InvalidRequest(f"sequenceLength is {length}, but the model takes at most {limit} positions")
    vocabulary = getattr(text, "vocab_size", None)
    if not vocabulary:
        raise InvalidRequest("the model's configuration has no vocab_size", hint="Give the option `inputs`.")
    # Small ids are often special tokens (padding among them): some models derive positions from them.
    low = min(vocabulary - 1, 10)
    ids = TensorInput(dtype="int64", shape=(batch, length), low=low, high=vocabulary - 1)
    mask = TensorInput(dtype="int64", shape=(batch, length), low=1, high=1)
    samples = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "is_encoder_decoder", False):
        samples["decoder_input_ids"] = ids
    return samples


def make_all(inputs: Mapping[str, TensorInput]) -> dict[str, torch.Tensor]:
    """The tensors, in the order given."""
    source = generator()
    return {name: sample.make(source) for name, sample in inputs.items()}
