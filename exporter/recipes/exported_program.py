"""Recipe `exported-program`: a `.pt2` archive, read by our own reader; raw weights by range, nothing unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, Field, StringConstraints
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from exporter.contract.base import Strict
from exporter.contract.errors import InvalidRequest, SourceNotFound
from exporter.contract.spec import Target
from exporter.recipes.samples import TensorInput, generator
from exporter.source.captured import Captured
from exporter.source.ports import SourceTree

Sample = tuple[tuple[object, ...], Mapping[str, object]]


class ExportedProgramOptions(Strict):
    """Options of the recipe `exported-program`."""

    method: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")] = "forward"
    file: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    inputs: Annotated[tuple[TensorInput, ...], Field(min_length=1, max_length=64)] | None = None


class ExportedProgramRecipe:
    """Takes a program that `torch.export.save` wrote. Its sample inputs are those of the archive, or are made up."""

    name: ClassVar[str] = "exported-program"
    description: ClassVar[str] = "A program saved by torch.export.save (.pt2)."
    Options: ClassVar[type[BaseModel]] = ExportedProgramOptions
    example: ClassVar[Mapping[str, Any]] = {
        "recipe": "exported-program",
        "source": "s3://models/resnet.pt2",
        "options": {},
        "target": {"backend": "portable"},
    }

    def availability(self) -> str | None:
        """Needs nothing beyond torch."""
        return None

    def capture(self, tree: SourceTree, options: ExportedProgramOptions, target: Target) -> Captured:
        """The archive's program as one method. `SourceUnsafe` for anything that is not plain data."""
        from exporter.source.pt2 import open_pt2

        program, weights, stored = open_pt2(tree, archive_name(tree, options.file), options.model)
        if target.backend != "cuda":
            weights.fill()  # the CPU back ends pack values: a remote archive's are read now, a local one's are mapped
        if options.inputs is not None:
            sample = _given_sample(program, options.inputs)
        else:
            sample = stored or made_up_sample(program)
        return Captured({options.method: program}, weights, {options.method: sample})


def archive_name(tree: SourceTree, wanted: str | None) -> str:
    """The archive among the source's files: the option `file`, else the only one."""
    files = tree.files()
    if wanted is not None:
        if wanted not in files:
            raise SourceNotFound(f"the source has no file {wanted}", file=wanted)
        return wanted
    found = sorted(name for name in files if name.endswith(".pt2")) or sorted(files)
    if len(found) != 1:
        raise InvalidRequest(
            f"the source has {len(found)} files that could be the program", hint="Name one with the option `file`."
        )
    return found[0]


def _given_sample(program: ExportedProgram, inputs: tuple[TensorInput, ...]) -> Sample:
    source = generator()
    leaves = [item.make(source) for item in inputs]
    spec = program.call_spec.in_spec
    if spec is None or spec.num_leaves != len(leaves):
        wanted = 0 if spec is None else spec.num_leaves
        raise InvalidRequest(f"the program takes {wanted} inputs, the option `inputs` has {len(leaves)}")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(args), kwargs


def made_up_sample(program: ExportedProgram) -> Sample:
    """A sample of the shapes and dtypes that the program was captured with: normal numbers, zeros for integers.

    A symbolic dimension takes the size that it had at the capture, where torch kept it, else the smallest allowed.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    source = generator()
    leaves = [
        _value(program, nodes[item].meta.get("val"), source) if item in nodes else item
        for item in program.graph_signature.user_inputs
    ]
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return tuple(args), kwargs


def _value(program: ExportedProgram, value: object, source: torch.Generator) -> object:
    if isinstance(value, torch.Tensor):
        shape = tuple(_size(program, size) for size in value.shape)
        if value.dtype.is_floating_point:
            return torch.randn(shape, generator=source).to(value.dtype)
        return torch.zeros(shape, dtype=value.dtype)
    return _size(program, value) if isinstance(value, torch.SymInt) else value


def _size(program: ExportedProgram, size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    bounds = program.range_constraints.get(size.node.expr)
    return max(2, int(bounds.lower)) if bounds is not None else 2
