"""Runs captured programs eagerly on their samples: what a compiled artifact has to reproduce."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from exporter.contract.errors import InvalidRequest, WeightlessError, first_line
from exporter.source.captured import Captured


@dataclass(frozen=True, slots=True)
class Case:
    """One method's flat inputs and flat outputs, in the program's order: tensors, numbers, booleans or None."""

    method: str
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]
    random: bool = False


def eager_cases(captured: Captured) -> list[Case]:
    """One case for each method with a sample, in the captured order; state that methods share is carried on.

    The captured weights are not changed: buffers that a method writes are cloned first. `InvalidRequest` where a
    program refuses its sample.
    """
    state: dict[str, torch.Tensor] = {}
    cases = []
    for method, program in captured.programs.items():
        if method not in captured.samples:
            continue
        args, kwargs = captured.samples[method]
        state = state if captured.share_buffers else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own deprecations
                cases.append(_run(method, program, args, kwargs, state))
        except (WeightlessError, MemoryError):
            raise
        except Exception as error:
            raise InvalidRequest(
                f"method {method} does not run on its sample inputs: {first_line(error)}",
                hint="The sample inputs must be ones that the model takes; check their number, shapes and types.",
                method=method,
            ) from error
    return cases


def flat_inputs(program: ExportedProgram, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """The sample as the program's flat inputs, keyword arguments in the order that the program was captured with."""
    spec = program.call_spec.in_spec
    names = spec.child(1).context if spec is not None else list(kwargs)
    ordered = {name: kwargs[name] for name in names if name in kwargs}
    if len(ordered) != len(kwargs):
        raise TypeError(f"unexpected keyword arguments {sorted(set(kwargs) - set(ordered))}")
    leaves, given = pytree.tree_flatten((args, ordered))
    if spec is not None and given.num_leaves != spec.num_leaves:
        raise TypeError(f"the program takes {spec.num_leaves} inputs, the sample has {given.num_leaves}")
    return tuple(leaves)


def _run(
    method: str,
    program: ExportedProgram,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    state: dict[str, torch.Tensor],
) -> Case:
    inputs = flat_inputs(program, args, kwargs)
    random = draws_random_numbers(program)
    if _writes_in_place(program):
        program = program.run_decompositions({})  # decomposes nothing; the signature then names what is written
    module = program.module(check_guards=False)
    for name in program.graph_signature.buffers_to_mutate.values():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        state.setdefault(name, holder.get_buffer(leaf).detach().clone())
        holder._buffers[leaf] = state[name]
    given = _copied((args, {name: kwargs[name] for name in kwargs}))
    with torch.no_grad():
        outputs = iter(pytree.tree_leaves(module(*given[0], **given[1])))
    changed = dict(zip(program.graph_signature.user_inputs, flat_inputs(program, *given), strict=True))
    # The runtime returns an input that the program writes like an output, in the order of the signature.
    results = [
        changed[spec.target] if spec.kind == OutputKind.USER_INPUT_MUTATION else next(outputs)
        for spec in program.graph_signature.output_specs
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)
    ]
    return Case(method, inputs, tuple(results), random)


def _operators(program: ExportedProgram) -> Iterator[tuple[fx.Node, OpOverload]]:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, OpOverload):
                    yield node, node.target


def _writes_in_place(program: ExportedProgram) -> bool:
    return any(operator._schema.is_mutable for _, operator in _operators(program))


def draws_random_numbers(program: ExportedProgram) -> bool:
    """Whether two runs on the same inputs differ by design."""
    return any(
        torch.Tag.nondeterministic_seeded in operator.tags and not _is_idle(node, operator)
        for node, operator in _operators(program)
    )


def _is_idle(node: fx.Node, operator: OpOverload) -> bool:
    """An operator that draws in training only, or a dropout with probability 0."""
    given = dict(zip((argument.name for argument in operator._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    if given.get("train") is False or given.get("training") is False:
        return True
    if "dropout" in operator._schema.name or "scaled_dot_product" in operator._schema.name:
        return bool(given.get("p", given.get("dropout_p", 0.0)) == 0.0)
    return "rrelu" in operator._schema.name and "training" not in given


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), tree)
