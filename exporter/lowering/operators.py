"""Which operators ExecuTorch's CPU runtime can run, asked of the runtime that is installed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import cache

from torch import fx
from torch._ops import OpOverload

_DECOMPOSED = frozenset({"aten", "prims", "prim", "quantized_decomposed", "dim_order_ops", "executorch_prim"})
"""Namespaces whose operators the compile decomposes or resolves; their kernels are checked after it."""
_IN_TEXT = re.compile(r"\b(?:torch\._?ops\.)?([A-Za-z_]\w*)(?:::|\.)([A-Za-z_]\w*(?:\.\w+)?)")
_COMPLAINTS = ("Missing out variants", "is not an Aten operator", "is not Aten Canonical", "not in allowed op")


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


def custom_operators(module: fx.GraphModule) -> list[str]:
    """Operators of other namespaces than ATen's in a captured graph (its submodules too) without a runtime kernel."""
    found = set()
    for child in module.modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                name = node.target._schema.name
                if node.target.namespace not in _DECOMPOSED and not _has_out_kernel(name):
                    found.add(name)
    return sorted(found)


def _has_out_kernel(name: str) -> bool:
    return any(known == name or known.startswith((f"{name}.", f"{name}_out.")) for known in runtime_operators())


def named_operators(text: str) -> list[str]:
    """Operators that an error text of the compile complains of; empty where the text is about something else."""
    if not any(complaint in text for complaint in _COMPLAINTS):
        return []
    found = {f"{namespace}::{name}" for namespace, name in _IN_TEXT.findall(text)}
    return sorted(name for name in found if name.split("::")[0] in {"aten", *_namespaces()})


def _namespaces() -> set[str]:
    import torch

    return {schema.name.split("::")[0] for schema in torch._C._jit_get_all_schemas()}
