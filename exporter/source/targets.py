"""What a node of an exported program may call.

torch resolves a target by walking attributes of `torch`, `operator` or `math`, so that any function that hangs
anywhere under them could be named. Here a target is either an operator of a known namespace, or on a fixed list.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

import torch

from exporter.contract.errors import UnsupportedModel
from exporter.source.expressions import Refused, words

_OPERATOR = re.compile(r"torch\.ops\.([a-z][a-z0-9_]*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", re.ASCII)
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.([a-z][a-z0-9_]*)", re.ASCII)

_NAMESPACES = {
    "aten": None,
    "prims": None,
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "torchao": "torchao",
    "torchvision": "torchvision",
    "llama": "executorch.extension.llm.custom_ops.custom_ops",
}
"""Namespaces of operators that compute on tensors only, and the installed module that registers them."""

_DENIED = words(
    "from_file save load warn format print item_size set_ set_data _set_item wait sleep _print backward "
    "_make_dual record_stream _reshape_alias _reshape_alias_copy"
)
"""Operators of those namespaces that reach outside of their tensors, or would if a kernel were registered.

`_reshape_alias` and the unchecked constructors of sparse tensors do so by not checking their arguments.
"""

_NO_RESULT = words(
    "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size "
    "_foreach_add_ _foreach_mul_ _foreach_copy_ _functional_assert_scalar _functional_sym_constrain_range"
)
"""Operators that return nothing and are still plain; any other without a result acts on something else."""

HIGHER_ORDER = words(
    "cond while_loop scan associative_scan map map_impl wrap_with_set_grad_enabled wrap_with_autocast out_dtype "
    "auto_functionalized auto_functionalized_v2 flex_attention invoke_subgraph strict_mode hints_wrapper "
    "wrap_activation_checkpoint tag_activation_checkpoint"
)

_PLAIN = {
    "_operator.": words(
        "add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor"
    ),
    "math.": words("ceil floor sqrt trunc"),
    "torch.sym_": words("float int ite max min not sqrt sum"),
    "torch._sym_": words("sqrt cos cosh sin sinh tan tanh asin acos atan log2"),
    "torch._functorch.predispatch.": words(
        "lazy_load_decompositions _vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim"
    ),
}
PLAIN = frozenset(prefix + name for prefix, names in _PLAIN.items() for name in names)
"""Functions of Python and torch on numbers, and what `torch.vmap` leaves in a graph."""


@lru_cache(maxsize=4096)
def check_target(target: str) -> None:
    """Refuse a target that is not on the lists. `UnsupportedModel` for an allowed one that is not installed here."""
    if target in PLAIN:
        return
    if match := _HIGHER_ORDER.fullmatch(target):
        if match[1] not in HIGHER_ORDER:
            raise Refused(f"the higher-order operator {match[1][:60]} is not on the list")
        return
    match = _OPERATOR.fullmatch(target)
    if match is None or match[1] not in _NAMESPACES:
        raise Refused("it is not torch.ops.<known namespace>.<operator>.<overload>, nor on the list of functions")
    namespace, name, overload = match.groups()
    if name in _DENIED or (name.endswith("_unsafe") and "sparse" in name):
        raise Refused("the operator reaches outside of its tensors")
    _check_schema(_find(namespace, name, overload), name)


def _find(namespace: str, name: str, overload: str) -> Any:
    module = _NAMESPACES[namespace]
    if module is not None:
        try:
            importlib.import_module(module)
        except Exception as error:  # a library that does not load raises OSError, RuntimeError, AssertionError, ...
            raise _missing(f"{namespace}::{name}") from error
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    known = isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads()  # type: ignore[no-untyped-call]
    if not known:
        if name.startswith("__") or overload.startswith("__"):
            raise Refused("it names an attribute of Python, not an operator")
        raise _missing(f"{namespace}::{name}.{overload}")
    found: Any = getattr(packet, overload)
    # TorchScript's own operators answer to torch.ops too (aten::save writes a file); they have no dispatcher entry.
    if not torch._C._dispatch_has_kernel(found.name()):
        raise Refused("it is not an operator of the dispatcher")
    return found


def _missing(operator: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The program calls {operator}, which is not installed here.",
        hint="Export with operators of aten, or install the package that registers this one beside the exporter.",
        operators=[operator],
    )


def _check_schema(operator: Any, name: str) -> None:
    schema = operator._schema
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Storage" in kind or "Stream" in kind or "__torch__" in kind or "filename" in argument.name:
            raise Refused("the operator takes more than tensors and numbers")
    if not schema.returns and name not in _NO_RESULT:
        raise Refused("the operator returns nothing and is not a known assertion")
