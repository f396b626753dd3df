"""Captured programs as ExecuTorch's CPU passes take them: weights dense, contiguous and frozen."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument


def with_plain_weights(program: ExportedProgram) -> ExportedProgram:
    """`program` itself, each weight that is not contiguous in a storage of its own replaced by a copy that is.

    Back ends copy whole storages: a slice would be stored with all that surrounds it, from the wrong offset. XNNPACK
    refuses weights in channels-last order, ExecuTorch a stride of 0. Ties stay ties.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    fqns = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None}
    for table in (program.state_dict, program.constants):
        for fqn, value in list(table.items()):
            if not isinstance(value, torch.Tensor):
                continue
            if not _is_plain(value):
                place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
                dense = copies.setdefault(place, value.detach().clone(memory_format=torch.contiguous_format))
                table[fqn] = torch.nn.Parameter(dense, False) if isinstance(value, torch.nn.Parameter) else dense
                if fqn in fqns:
                    _restride(nodes[fqns[fqn]], dense)
            elif value.requires_grad:
                value.requires_grad_(False)
    return program


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    whole = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == whole


def _restride(node: fx.Node, dense: torch.Tensor) -> None:
    """Give a placeholder's fake value the strides of the copy."""
    fake = node.meta.get("val")
    if isinstance(fake, torch.Tensor):
        node.meta["val"] = fake.new_empty_strided(tuple(dense.shape), dense.stride())


def initial_state(program: ExportedProgram) -> list[str]:
    """Placeholders of the buffers that an edge program writes and that do not start as zeros.

    ExecuTorch does not store the initial value of a mutable buffer unless told; zeros (KV caches) need no storage.
    """
    tables = {**program.constants, **program.state_dict}
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    return [
        name
        for name, fqn in signature.inputs_to_buffers.items()
        if fqn in written and isinstance(tables.get(fqn), torch.Tensor) and bool(torch.any(tables[fqn] != 0))
    ]


def copy_returned_weights(program: ExportedProgram) -> None:
    """Let a program return copies of weights that it returned as they are.

    ExecuTorch 1.5.1's runtime gives an output that it did not plan, such as an external weight, memory of the caller:
    the weight then reads as zeros, for every other operator too. Its partitioner refuses a delegated weight that is an
    output as well. `alias_copy`, since XNNPACK takes `clone`, and dies of one that does nothing else.
    """
    signature = program.graph_signature
    weights = {spec.arg.name for spec in signature.input_specs if spec.target is not None}
    output = next(node for node in program.graph.nodes if node.op == "output")
    (values,) = output.args
    assert isinstance(values, tuple | list)
    returned = list(values)
    for index, spec in enumerate(signature.output_specs):
        value = returned[index]
        if spec.kind != OutputKind.USER_OUTPUT or not isinstance(value, fx.Node) or value.name not in weights:
            continue
        with program.graph.inserting_before(output):
            copy = program.graph.call_function(torch.ops.aten.alias_copy.default, (value,))
        copy.meta = dict(value.meta)
        returned[index] = copy
        spec.arg = TensorArgument(copy.name)
    output.args = (tuple(returned),)
    program.graph_module.recompile()


def views_a_constant(program: ExportedProgram) -> bool:
    """Whether an edge program reshapes a weight: ExecuTorch 1.5.1 cannot make that a view if the weight is external."""
    signature = program.graph_signature
    constants = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    return any(
        node.op == "call_function"
        and "view_copy" in str(node.target)
        and isinstance(node.args[0], fx.Node)
        and node.args[0].name in constants
        for node in program.graph.nodes
    )
