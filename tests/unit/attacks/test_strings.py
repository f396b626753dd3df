"""The strings that torch evaluates: what torch itself writes passes, and nothing that could do more."""

from __future__ import annotations

import json

import pytest
import torch

from exporter.contract.errors import UnsupportedModel
from exporter.source.expressions import Refused, check_expression, check_guard
from exporter.source.targets import HIGHER_ORDER, PLAIN, check_target
from exporter.source.treespec import clean_treespec, keyword_names


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Symbol('s67', positive=True, integer=True))",
        "Add(Symbol('u0', integer=True), Integer(-1))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "Pow(Symbol('s0', integer=True), Rational(1, 2))",
        "FloorDiv(Symbol('s0', integer=True), Integer(3))",
        "Max(Integer(1), Symbol('u1', integer=True))",
        "Float('1.5', precision=53)",
        "ToFloat(Symbol('s1', integer=True))",
        "Eq(Symbol('u0', integer=True), Integer(4))",
        "GreaterThan(Symbol('u0', integer=True), Integer(2))",
        "Piecewise(ExprCondPair(Integer(1), Eq(Symbol('s0'), Integer(1))), ExprCondPair(Integer(2), true))",
        "OpaqueUnaryFn_sqrt(Symbol('s1', integer=True))",
        "2*s67",
        "s0 + s1 // 2",
        "(s0 - 1)**2",
        "Max(1, s0) <= 64",
    ],
)
def test_expressions_that_torch_writes_pass(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s0.__class__",
        "__import__('os')",
        "eval('1')",
        "Symbol('s0; import os')",
        "Symbol('Integer')",
        "Symbol('s0', **{})",
        "Symbol('s0', commutative=print())",
        "Symbol(*[])",
        "Function('f')(s0)",
        "Lambda(s0, s0)",
        "sympify('1')",
        "S('1')",
        "parse_expr('1')",
        "lambdify(s0, 'x')",
        "Integer('9' * 9)",
        "Integer(9, 9)",
        "Rational(1, 0)",
        "Float('nan')",
        "Float('1', precision=10**9)",
        "Float(print())",
        "[s0]",
        "{s0}",
        "{1: 2}",
        "(lambda: 1)()",
        "[x for x in s0]",
        "(yield)",
        "s0 if s0 else s1",
        "f'{s0}'",
        "(x := 1)",
        "s0[0]",
        "s0; s1",
        "s0\n+ s1",
        "'s0'",
        "s0 + 'x'",
        "None",
        "...",
        "1j",
        "s\u00f8",
        "ｓ0",
        "s0\\\n",
        "factorial(9)",
        "9!",
        "9**9**9",
        "Pow(Integer(9), Integer(9999))",
        "Pow(Pow(Pow(Integer(9), Integer(64)), Integer(64)), Integer(64))",
        "Pow(Integer(2), Symbol('s0', integer=True))",
        "LShift(Integer(1), Integer(999999))",
        "1 << 999999",
        "1 << s0",
        f"Integer({'9' * 2000})",
        "Mul(" + ", ".join(["s0"] * 100) + ")",
        "(" * 250 + "s0" + ")" * 250,
        "s0 # more",
        "-" * 10_000 + "s0",
        "+".join(["s0"] * 3000),
        "s0" * 10_001,
    ],
)
def test_other_expressions_do_not(text: str) -> None:
    with pytest.raises(Refused):
        check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0] >= 2",
        "L['x'].size()[0] // 2 != 1",
        "(L['flat_args'][0].size()[1] * L['x'].stride()[0]) % 8 == 0",
        "2 <= L['bag']['b c.d'].size()[0] <= 64",
        "L['n'] == 3 and not L['flag']",
        "math.ceil(L['x'].size()[0] / 3) < 9",
        "L['x'].storage_offset() == 0",
        "max(1, L['x'].size()[0]) > 0",
        "L['y'] is None",
        "torch.sym_float(L['n']) < math.inf",
    ],
)
def test_guards_that_torch_writes_pass(text: str) -> None:
    check_guard(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.os.system('id')",
        "torch.load('x')",
        "math.__loader__",
        "L['x'].__class__",
        "L['x'].size",
        "L['x'].size(0)",
        "L['x'].tolist()",
        "L['x'].data.storage()",
        "L[L['x']]",
        "L['x'][print()]",
        "L['x'][0:1]",
        "L['a\\'b']",
        "L['\"']",
        "L['x'] == 'text'",
        "getattr(L, 'x')",
        "len(L['x'], key=print)",
        "args[0]",
        "self",
        "globals()",
        "9**9**9 == L['n']",
        "math.pow(9, 9999999) < 1",
        "[1 for _ in L['x']]",
        "(lambda: 1)()",
        "L['x'].size()[0] == 2 #",
        "L['x'].size()[0]\n== 2",
        "L['x'].size()[0], print()",
        "x = 1",
        "import os",
    ],
)
def test_other_guards_do_not(text: str) -> None:
    with pytest.raises(Refused):
        check_guard(text)


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.add.Tensor",
        "torch.ops.aten.linear.default",
        "torch.ops.aten.__and__.Tensor",
        "torch.ops.aten._assert_async.msg",
        "torch.ops.aten.sym_constrain_range_for_size.default",
        "torch.ops.prims.convert_element_type.default",
        "torch.ops.higher_order.cond",
        "_operator.mul",
        "math.trunc",
        "torch.sym_max",
    ],
)
def test_targets_that_torch_writes_pass(target: str) -> None:
    check_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "",
        "torch",
        "torch.load",
        "torch.os.system",
        "torch.hub.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.ops.load_library",
        "torch.ops.aten",
        "torch.ops.aten.add",
        "torch.ops.aten.add.Tensor.__class__",
        "torch.ops.aten.__class__.mro",
        "torch.ops.aten.add.__init__",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.from_file.out",
        "torch.ops.aten.save.default",
        "torch.ops.aten.set_.source_Storage_storage_offset",
        "torch.ops.aten._reshape_alias.default",
        "torch.ops.aten._sparse_coo_tensor_unsafe.default",
        "torch.ops.aten._cufft_clear_plan_cache.default",
        "torch.ops.aten.retain_grad.default",
        "torch.ops.image.read_file.default",
        "torch.ops.quantized.linear_prepack.default",
        "torch.ops.c10d.barrier.default",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.higher_order.inductor_compiled_code",
        "torch.ops.higher_order.triton_kernel_wrapper_functional",
        "torch.ops.higher_order.executorch_call_delegate",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "_operator.call",
        "_operator.setitem",
        "_operatorX.mul",
        "_operator.mul.__self__",
        "math.__loader__.load_module",
        "mathX.trunc",
        "builtins.eval",
        "#ext:op",
        "torch.ops.aten.add.Tensor\n",
        " torch.ops.aten.add.Tensor",
    ],
)
def test_other_targets_do_not(target: str) -> None:
    with pytest.raises(Refused):
        check_target(target)


def test_an_operator_that_is_not_installed_is_the_models_fault_not_an_attack() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_target("torch.ops.aten.no_such_operator.default")
    assert caught.value.details["operators"] == ["aten::no_such_operator.default"]


def test_the_lists_name_things_that_exist() -> None:
    import math
    import operator

    roots = {"_operator": operator, "math": math, "torch": torch}
    for name in sorted(PLAIN):
        first, *rest = name.split(".")
        found = roots[first]
        for part in rest:
            found = getattr(found, part)
        assert callable(found)
    assert "cond" in HIGHER_ORDER


LEAF = {"type": None, "context": None, "children_spec": []}


def spec(kind: str | None, context: object, *children: object) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": list(children)}])


def test_tree_specs_of_plain_containers_stay() -> None:
    text = spec("builtins.dict", '["a", 1]', LEAF, json.loads(spec("builtins.list", "null", LEAF))[1])
    assert json.loads(clean_treespec(text)) == json.loads(text)
    assert torch.utils._pytree.treespec_loads(clean_treespec(text)).num_leaves == 2


def test_other_classes_become_tuples_of_as_many_leaves() -> None:
    for kind, context in (
        ("transformers.modeling_outputs.BaseModelOutput", '{"anything": ["goes"]}'),
        ("collections.namedtuple", "os.stat_result"),
        ("collections.deque", "null"),
        ("collections.defaultdict", {"default_factory_module": "os", "default_factory_name": "system"}),
    ):
        loaded = torch.utils._pytree.treespec_loads(clean_treespec(spec(kind, context, LEAF, LEAF)))
        assert loaded.type is tuple
        assert loaded.num_leaves == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[2, {}]",
        "[1, []]",
        "[true, {}]",
        spec(None, None, LEAF),
        spec(None, "x"),
        spec("builtins.dict", "[]", LEAF),
        spec("builtins.dict", '["a", "a"]', LEAF, LEAF),
        spec("builtins.dict", '[{"__enum__": true, "fqn": "os:x", "name": "y"}]', LEAF),
        spec("builtins.dict", '["a\'b"]', LEAF),
        spec("builtins.dict", '["a\\nb"]', LEAF),
        spec("builtins.dict", "[null]", LEAF),
        spec("builtins.dict", 7, LEAF),
        "[1, " + '{"type": "builtins.list", "context": "null", "children_spec": [' * 70 + "]}" * 70 + "]",
        "[" * 100_000,
    ],
)
def test_malformed_tree_specs_do_not(text: str) -> None:
    with pytest.raises(Refused):
        clean_treespec(text)


def test_keywords_of_an_input_spec_are_found() -> None:
    args = json.loads(spec("builtins.tuple", "null", LEAF))[1]
    kwargs = json.loads(spec("builtins.dict", '["a", "b"]', LEAF, LEAF))[1]
    assert keyword_names(clean_treespec(spec("builtins.tuple", "null", args, kwargs))) == ["a", "b"]
    assert keyword_names(clean_treespec(spec("builtins.tuple", "null", LEAF))) == []
