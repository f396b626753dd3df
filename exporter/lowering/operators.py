"""Which operators ExecuTorch's CPU runtime can run, asked of the runtime that is installed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import cache

import torch
from torch import fx
from torch._ops import OpOverload

_DECOMPOSED = frozenset({"aten", "prims", "prim", "quantized_decomposed", "dim_order_ops", "executorch_prim"})
"""Namespaces whose operators the compile decomposes or resolves; their kernels are checked after it."""
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
