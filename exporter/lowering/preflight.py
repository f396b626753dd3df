"""Operators without a CUDA fallback kernel, named before any compile.

Upstream finds them too, but while it writes the wrapper, after all kernels were tuned. Inductor turns an operator into
a call of libtorch where its lowering is a fallback handler or where it has none; the ExecuTorch runtime ships only the
kernels of `CudaBackend.get_supported_fallback_kernels`. What Inductor decides by shape (a convolution without a Triton
candidate, say) is not foreseen here and is still refused after the compile, by the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any_only, tree_map_only

from exporter.contract.errors import UnsupportedModel

_ATTENTION = "aten::scaled_dot_product_attention"
"""Upstream replaces it by a Triton kernel, or makes it decompose (SDPBackend.MATH) with `tritonKernelMode` off."""
_TRITON_REPLACED = "aten::topk"
"""Upstream's pass replaces it while `tritonKernelMode` is on (executorch.backends.cuda.triton.replacement_pass)."""
_RESOLVED = frozenset({"prim", "prims", "export"})
"""Namespaces that the export itself resolves: `export` reads the parts of tensor subclasses."""


def check_operators(method: str, program: ExportedProgram, *, triton: bool) -> None:
    """`UnsupportedModel` with every operator of the program that would need a kernel that the runtime lacks."""
    from executorch.backends.cuda.cuda_backend import CudaBackend

    kernels = CudaBackend.get_supported_fallback_kernels()
    missing: set[str] = set()
    for node, op in _operators(program.graph_module):
        if op._schema.name == _ATTENTION or (triton and op._schema.name == _TRITON_REPLACED):
            continue
        missing.update(str(leaf) for leaf in _leaves(node, op) if needs_missing_kernel(leaf, kernels))
    if missing:
        names = sorted(missing)
        raise UnsupportedModel(
            f"method {method} needs {len(names)} operators that the CUDA runtime has no kernel for: "
            f"{', '.join(names[:8])}",
            stage="compiling",
            method=method,
            operators=names,
        )


def _operators(module: GraphModule) -> Iterator[tuple[Node, OpOverload]]:
    """Each operator of the graph and of its control-flow branches once, with the first node that calls it."""
    seen: set[OpOverload] = set()
    for child in module.modules():
        if not isinstance(child, GraphModule):
            continue
        for node in child.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target not in seen:
                seen.add(node.target)
                yield node, node.target


class _Recorder(TorchDispatchMode):
    """Runs operators on fake tensors, decomposed as Inductor would, and keeps those that are left."""

    def __init__(self, table: Mapping[OpOverload, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table = table
        self.leaves: set[OpOverload] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._table:
            with self:
                result = self._table[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.leaves.add(func)
        return func(*args, **(kwargs or {}))


def _leaves(node: Node, op: OpOverload) -> set[OpOverload]:
    """What Inductor is left with of one call: `op` itself where nothing decomposes it or its example fails to run."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    if op not in table and not _decomposes(op):
        return {op}
    args, kwargs = tree_map_only(Node, lambda used: used.meta.get("val"), (node.args, node.kwargs))
    symbolic = tree_any_only(torch.SymInt, lambda _: True, (args, kwargs)) or tree_any_only(
        torch.Tensor, lambda tensor: any(isinstance(size, torch.SymInt) for size in tensor.shape), (args, kwargs)
    )
    if symbolic:
        # A decomposition may specialise symbolic sizes: the captured program must stay as it is.
        return set()
    recorder = _Recorder(table)
    try:
        with torch.no_grad(), recorder:
            op(*args, **kwargs)
    except Exception:
        return set()
    return recorder.leaves


def needs_missing_kernel(op: OpOverload, kernels: Collection[str]) -> bool:
    """Whether Inductor can only call `op` as a library kernel that is not among `kernels`.

    In-place operators and views are made functional before Inductor sees them.
    """
    from torch._inductor.lowering import lowerings

    if not kernels_of(op).isdisjoint(kernels):
        return False
    lowering = lowerings.get(op)
    if lowering is not None:
        return bool(getattr(lowering, "_is_fallback_handler", False))
    return not (op._schema.is_mutable or op.is_view or op.namespace in _RESOLVED or _is_triton(op))


def kernels_of(op: OpOverload) -> frozenset[str]:
    """The names under which Inductor may call `op`, as upstream's table spells them."""
    namespace, _, base = op._schema.name.partition("::")
    name = base if op._overloadname == "default" else f"{base}_{op._overloadname}"
    return frozenset({f"at::_ops::{name}::call", f"aoti_torch_cuda_{name}", f"{namespace}::{name}"})


def _decomposes(op: OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(op.has_kernel_for_dispatch_key(key) or key in op.py_kernels)


def _is_triton(op: OpOverload) -> bool:
    from torch._library.triton import get_triton_kernels_for_op

    return op.namespace == "triton" or bool(get_triton_kernels_for_op(op._schema.name))
