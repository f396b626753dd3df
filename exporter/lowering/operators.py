"""Which operators ExecuTorch's CPU runtime can run, asked of the runtime that is installed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import cache

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

_DECOMPOSED = frozenset({"aten", "prims", "prim", "quantized_decomposed", "dim_order_ops", "executorch_prim"})
"""Namespaces whose operators the compile decomposes or resolves; their kernels are checked after it."""
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    )
)
"""What the ATen kernels of ExecuTorch 1.5.1 compute with; of other dtypes (float8, unsigned 16 bits and up) they only
copy, or the program cannot be written at all."""
_IN_TEXT = re.compile(r"\b(?:torch\._?ops\.)?([A-Za-z_]\w*)(?:::|\.)([A-Za-z_]\w*(?:\.\w+)?)")
_COMPLAINTS = (
    "Missing out variants",
    "is not an Aten operator",
    "is not Aten Canonical",
    "not in allowed op",
    "was not decomposed or delegated",
)


@cache
def runtime_operators() -> frozenset[str]:
    """Kernels registered in the installed CPU runtime, such as ``aten::add.out``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "experimental"
        from executorch.runtime import Runtime

    return frozenset(Runtime.get().operator_registry.operator_names)


def missing_kernels(operators: Collection[str]) -> list[str]:
    """Those of a program's operators that the runtime has no kernel for, sorted. ``executorch_prim`` is built in."""
    known = runtime_operators()
    return sorted(name for name in operators if name not in known and not name.startswith("executorch_prim::"))


def unrunnable_operators(module: fx.GraphModule) -> list[str]:
    """Operators of a captured graph, its branches too, that the runtime is known to lack before any compile.

    These are operators of other namespaces than ATen's without a kernel, and convolutions over more than two
    dimensions: ExecuTorch's kernel exists, and refuses them when it runs.
    """
    found = set()
    for child in module.modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                name = node.target._schema.name
                if node.target.namespace not in _DECOMPOSED and not _has_out_kernel(name):
                    found.add(name)
                elif _is_volume_convolution(node):
                    found.add(str(node.target).replace(".", "::", 1))
    return sorted(found)


def unrunnable_dtypes(module: fx.GraphModule) -> dict[str, list[str]]:
    """ATen operators of a captured graph, its branches too, by the dtype that their kernels refuse when they run."""
    found: dict[str, set[str]] = {}
    for child in module.modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target.namespace == "aten" and node.users:
                for dtype in _dtypes(node) - _DTYPES:
                    found.setdefault(str(dtype).removeprefix("torch."), set()).add(str(node.target))
    return {dtype: sorted(name.replace(".", "::", 1) for name in names) for dtype, names in sorted(found.items())}


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    values = pytree.tree_leaves([item.meta.get("val") for item in (node, *node.all_input_nodes)])
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def _is_volume_convolution(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return "conv" in str(node.target) and isinstance(value, torch.Tensor) and value.dim() > 4


def _has_out_kernel(name: str) -> bool:
    return any(known == name or known.startswith((f"{name}.", f"{name}_out.")) for known in runtime_operators())


def named_operators(text: str) -> list[str]:
    """Operators that an error text of the compile complains of; empty where the text is about something else."""
    if not any(complaint in text for complaint in _COMPLAINTS):
        return []
    edge = re.findall(r"with op <EdgeOpOverload: (\w+)\.([\w.]+)>", text)
    found = {f"{namespace}::{name}" for namespace, name in edge or _IN_TEXT.findall(text)}
    return sorted(name for name in found if name.split("::")[0] in {"aten", *_namespaces()})


def _namespaces() -> set[str]:
    return {schema.name.split("::")[0] for schema in torch._C._jit_get_all_schemas()}
