"""Copies of captured programs that share, or replace, their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.export import ExportedProgram


def copy_program(
    program: ExportedProgram, replace: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> ExportedProgram:
    """A program with a graph of its own, on the same tensors, or on those that `replace` gives for (FQN, tensor).

    torch copies a graph node by node and then calls an input named like a builtin (`input`, `max`) by another name than
    the signature does; names are put back.
    """
    memo: dict[int, object] = {}
    for table in (program.state_dict, program.constants):
        for fqn, tensor in table.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = tensor if replace is None else replace(fqn, tensor)
    made: ExportedProgram = copy.deepcopy(program, memo)
    for node, original in zip(made.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return made
