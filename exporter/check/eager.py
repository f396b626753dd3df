"""Runs captured programs eagerly on their samples: what a compiled artifact has to reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from exporter.contract.errors import InvalidRequest, WeightlessError, first_line
from exporter.source.captured import Captured


@dataclass(frozen=True, slots=True)
class Case:
    """One method's flat inputs and flat outputs, in the program's order: tensors, numbers, booleans or None."""

    method: str
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


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
    module = program.module(check_guards=False)
    for name in program.graph_signature.buffers_to_mutate.values():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        state.setdefault(name, holder.get_buffer(leaf).detach().clone())
        holder._buffers[leaf] = state[name]
    with torch.no_grad():
        outputs = module(*_copied(args), **_copied(dict(kwargs)))
    return Case(method, inputs, tuple(pytree.tree_leaves(outputs)))


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), tree)
