"""Every way that is known from a `.pt2` archive into a running process, one archive each.

An entry alters a good archive so that torch's own loader, or the module that it gives, would touch the file `canary`.
`stock` says that it does with the installed torch; test_doors proves it in a child process.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.unit.attacks.archives import CONSTANTS, MODEL, SAMPLES, WEIGHTS, Members, edit_json

Alter = Callable[[Members, Path], Members]


@dataclass(frozen=True)
class Door:
    """One attack: its name, how to make it, whether plain torch walks through, whether ours opens it defused."""

    name: str
    alter: Alter
    stock: bool = True
    defused: bool = False


DOORS: list[Door] = []


def door(name: str, *, stock: bool = True, defused: bool = False) -> Callable[[Alter], Alter]:
    """Register an attack."""

    def register(alter: Alter) -> Alter:
        DOORS.append(Door(name, alter, stock, defused))
        return alter

    return register


def touch(canary: Path) -> str:
    """A Python expression that makes the file."""
    return f"__import__('pathlib').Path('{canary}').touch()"


def double_quoted(canary: Path) -> str:
    """The same expression without a single quote, as a string that steps out of double quotes."""
    return f'"+str(__import__("pathlib").Path("{canary}").touch())+"'


class Touch:
    """A pickle that makes the file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def graph_of(document: Any) -> Any:
    return document["graph_module"]["graph"]


def change(members: Members, edit: Callable[[Any], Any]) -> Members:
    return edit_json(members, MODEL, edit)


def rename(members: Members, old: str, new: str) -> Members:
    """Every JSON string `old` of the program becomes `new`."""
    text = members[MODEL].decode().replace(json.dumps(old), json.dumps(new))
    return {**members, MODEL: text.encode()}


def change_in_spec(members: Members, edit: Callable[[Any, Any], None]) -> Members:
    """Change the signature of the whole module: `edit(signature, its input spec)`."""

    def edit_signature(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        edit(signature, spec[1])
        signature["in_spec"] = json.dumps(spec)

    return change(members, edit_signature)


def expression(text: str) -> dict[str, Any]:
    return {"as_expr": {"expr_str": text, "hint": {"as_int": 3}}}


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# What torch evaluates.


@door("expr_str")
def _(members: Members, canary: Path) -> Members:
    return change(
        members, lambda d: graph_of(d)["tensor_values"]["x"]["sizes"].__setitem__(0, expression(touch(canary)))
    )


@door("expr_str as a list", stock=False)
def _(members: Members, canary: Path) -> Members:
    size = {"as_expr": {"expr_str": [touch(canary)], "hint": None}}
    return change(members, lambda d: graph_of(d)["tensor_values"]["x"]["sizes"].__setitem__(0, size))


@door("expr_str of a symbolic integer")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        graph = graph_of(document)
        graph["nodes"].insert(0, {
            "target": "torch.ops.aten.sym_size.int", "metadata": {}, "outputs": [{"as_sym_int": {"as_name": "rows"}}],
            "inputs": [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
                       {"name": "dim", "arg": {"as_int": 0}, "kind": 1}],
        })  # fmt: skip
        graph["sym_int_values"]["rows"] = expression(touch(canary))

    return change(members, edit)


@door("expr_str in the graph of a branch")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        cond = next(n for n in graph_of(document)["nodes"] if n["target"].endswith("cond"))
        inner = cond["inputs"][1]["arg"]["as_graph"]["graph"]
        inner["tensor_values"]["sin"]["sizes"][0] = expression(touch(canary))

    return change(members, edit)


@door("expr_str with a lambda")
def _(members: Members, canary: Path) -> Members:
    text = f"(lambda: {touch(canary)})()"
    return change(members, lambda d: graph_of(d)["tensor_values"]["x"]["sizes"].__setitem__(0, expression(text)))


@door("guards_code")
def _(members: Members, canary: Path) -> Members:
    return change(members, lambda d: d["guards_code"].append(f"{touch(canary)} is None"))


@door("guards_code with a string that steps out of torch's own quotes")
def _(members: Members, canary: Path) -> Members:
    return change(members, lambda d: d["guards_code"].append(f"L['x'].size()[0] != '{double_quoted(canary)}'"))


@door("a constant string input, which torch quotes into a guard")
def _(members: Members, canary: Path) -> Members:
    return rename(members, "plain", f"' or {touch(canary)} or 'plain")


@door("a key of the sample inputs, which torch quotes into a guard")
def _(members: Members, canary: Path) -> Members:
    key = double_quoted(canary)
    args, kwargs = torch.load(io.BytesIO(members[SAMPLES]), weights_only=True)
    changed = {**members, SAMPLES: torch_saved((args, {"bag": {key: kwargs["bag"]["k"]}}))}

    def edit(signature: Any, spec: Any) -> None:
        spec["children_spec"][1]["children_spec"][0]["context"] = json.dumps([key])

    return change_in_spec(changed, edit)


@door("a key of the sample inputs alone", stock=False)
def _(members: Members, canary: Path) -> Members:
    args, kwargs = torch.load(io.BytesIO(members[SAMPLES]), weights_only=True)
    bag = {double_quoted(canary): kwargs["bag"]["k"]}
    return {**members, SAMPLES: torch_saved((args, {"bag": bag}))}


# What torch writes into the source of a function.


@door("the name of an input")
def _(members: Members, canary: Path) -> Members:
    return rename(members, "bag_k", f"bag_k={touch(canary)}")


@door("the name of a result", stock=False)
def _(members: Members, canary: Path) -> Members:
    name = f"evil = 0\n{touch(canary)}\ndef other(self):\n    rest"

    def edit(document: Any) -> None:
        graph = graph_of(document)
        graph["tensor_values"][name] = graph["tensor_values"]["x"]
        graph["nodes"].insert(0, {
            "target": "torch.ops.aten.sin.default", "metadata": {}, "outputs": [{"as_tensor": {"name": name}}],
            "inputs": [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}], "name": "evil",
        })  # fmt: skip

    return change(members, edit)


@door("the name of an argument of forward")
def _(members: Members, canary: Path) -> Members:
    def edit(signature: Any, spec: Any) -> None:
        signature["forward_arg_names"].append(f"extra={touch(canary)}")

    return change_in_spec(members, edit)


@door("a keyword of the input spec", stock=False)
def _(members: Members, canary: Path) -> Members:
    def edit(signature: Any, spec: Any) -> None:
        spec["children_spec"][1]["context"] = json.dumps([f"bag': {touch(canary)}, 'bag"])

    return change_in_spec(members, edit)


@door("a keyword of a call")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        cond = next(n for n in graph_of(document)["nodes"] if n["target"].endswith("cond"))
        cond["inputs"].append({"name": f"a={touch(canary)}, b", "arg": {"as_int": 1}, "kind": 2})

    return change(members, edit)


@door("the name of a branch")
def _(members: Members, canary: Path) -> Members:
    return rename(members, "true_graph_0", f'x", open("{canary}", "w")) #')


# What torch imports and looks up.


def call(target: str, *arguments: dict[str, Any]) -> Callable[[Any], None]:
    """Let the program do nothing but call `target` and give an input back, without a verifier that would object."""

    def edit(document: Any) -> None:
        inputs = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]
        node = {"target": target, "inputs": inputs, "outputs": [{"as_none": True}], "metadata": {}}
        result = {"as_tensor": {"name": "bag_k"}}
        graph_of(document).update(nodes=[node], outputs=[result])
        document["graph_module"]["signature"]["output_specs"] = [{"user_output": {"arg": result}}]
        document["verifiers"] = []

    return edit


@door("os.system as a call target", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, call("torch.os.system", {"as_string": f"touch {canary}"}))


@door("a function as an operator argument")
def _(members: Members, canary: Path) -> Members:
    wrap = "torch.ops.higher_order.wrap_with_set_grad_enabled"
    arguments = {"as_bool": False}, {"as_operator": "torch.os.popen"}, {"as_string": f"touch {canary}"}
    return change(members, call(wrap, *arguments))


@door("the function that calls a function", stock=False)
def _(members: Members, canary: Path) -> Members:
    node = call("_operator.call", {"as_operator": "_operator.methodcaller"}, {"as_string": "touch"})
    return change(members, node)


@door("a function that reads a file by name as an operator")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        graph = graph_of(document)
        graph["tensor_values"]["stolen"] = {
            **graph["tensor_values"]["bag_k"], "sizes": [{"as_int": 8}], "strides": [{"as_int": 1}],
        }  # fmt: skip
        graph["nodes"].insert(0, {
            "target": "torch.ops.aten.from_file.default", "metadata": {},
            "outputs": [{"as_tensor": {"name": "stolen"}}],
            "inputs": [{"name": "filename", "arg": {"as_string": str(canary)}, "kind": 1},
                       {"name": "shared", "arg": {"as_bool": True}, "kind": 1},
                       {"name": "size", "arg": {"as_int": 8}, "kind": 1}],
        })  # fmt: skip

    return change(members, edit)


@door("an operator of TorchScript that writes a file", stock=False)
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        graph_of(document)["nodes"].insert(0, {
            "target": "torch.ops.aten.save.default", "metadata": {}, "outputs": [],
            "inputs": [{"name": "item", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
                       {"name": "filename", "arg": {"as_string": str(canary)}, "kind": 1}],
        })  # fmt: skip

    return change(members, edit)


def with_out_spec(members: Members, spec: dict[str, Any]) -> Members:
    def edit(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, spec])

    return change(members, edit)


LEAF = {"type": None, "context": None, "children_spec": []}


@door("an enum in a tree spec, whose module is imported")
def _(members: Members, canary: Path) -> Members:
    enum = {"__enum__": True, "fqn": f"{canary.stem}_module:Enum", "name": "A"}
    return with_out_spec(members, {"type": "builtins.dict", "context": json.dumps([enum]), "children_spec": [LEAF]})


@door("a defaultdict in a tree spec, whose factory is imported", defused=True)
def _(members: Members, canary: Path) -> Members:
    context = {
        "default_factory_module": f"{canary.stem}_module",
        "default_factory_name": "Enum",
        "dict_context": ["a"],
    }
    return with_out_spec(members, {"type": "collections.defaultdict", "context": context, "children_spec": [LEAF]})


# What torch unpickles.


@door("a pickled weight")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        document["config"]["linear.weight"].update(path_name="weight_9", use_pickle=True)

    return {**edit_json(members, WEIGHTS, edit), "data/weights/weight_9": torch_saved(Touch(canary))}


@door("a pickled tensor constant")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        document["config"]["lifted_tensor_0"].update(path_name="tensor_9", use_pickle=True)

    return {**edit_json(members, CONSTANTS, edit), "data/constants/tensor_9": torch_saved(Touch(canary))}


@door("an opaque object", stock=torch.__version__ >= "2.12")
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        document["config"]["thing"] = {
            "path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None,
        }  # fmt: skip

    changed = edit_json(members, CONSTANTS, edit)
    return {**changed, "data/constants/opaque_obj_0": pickle.dumps(Touch(canary))}


@door("all weights pickled in one file")
def _(members: Members, canary: Path) -> Members:
    return {**members, "data/weights/model.pt": torch_saved(Touch(canary))}


@door("all constants pickled in one file")
def _(members: Members, canary: Path) -> Members:
    return {**members, "data/constants/model.pt": torch_saved(Touch(canary))}


@door("pickled sample inputs")
def _(members: Members, canary: Path) -> Members:
    return {**members, SAMPLES: torch_saved(((Touch(canary),), {}))}


# Closed too, though no file can show it with the installed torch.


@door("a script object", stock=False)
def _(members: Members, canary: Path) -> Members:
    def edit(document: Any) -> None:
        document["config"]["thing"] = {
            "path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None,
        }  # fmt: skip

    return {**edit_json(members, CONSTANTS, edit), "data/constants/custom_obj_0": b"PK"}


@door("a compiled library", stock=False)
def _(members: Members, canary: Path) -> Members:
    return {**members, "data/aotinductor/model/model.so": b"\x7fELF"}


@door("a custom object among the values", stock=False)
def _(members: Members, canary: Path) -> Members:
    values = {"thing": {"name": "thing", "class_fqn": "__torch__.torch.classes.quantized.LinearPackedParamsBase"}}
    return change(members, lambda d: graph_of(d).update(custom_obj_values=values))


@door("an extension target", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, call("#thing:op", {"as_int": 1}))


@door("a higher-order operator that prints", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, call("torch.ops.higher_order.print", {"as_string": "{0.__class__}"}))


@door("a higher-order operator with assembly", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, call("torch.ops.higher_order.inline_asm_elementwise", {"as_string": "trap"}))


@door("an unknown verifier", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, lambda d: d.update(verifiers=["EDGE"]))


@door("a string argument that leaves the quotes of generated C++", stock=False)
def _(members: Members, canary: Path) -> Members:
    return rename(members, "tanh", f'tanh"); system("touch {canary}"); ("')


@door("a weight called like an attribute of every object", stock=False)
def _(members: Members, canary: Path) -> Members:
    changed = rename(members, "linear.weight", "__class__.forward")
    text = changed[WEIGHTS].decode().replace('"linear.weight"', '"__class__.forward"')
    return {**changed, WEIGHTS: text.encode()}


@door("an expression that takes all memory", stock=False)
def _(members: Members, canary: Path) -> Members:
    text = "Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"
    return change(members, lambda d: graph_of(d)["tensor_values"]["x"]["sizes"].__setitem__(0, expression(text)))


@door("a symbol numbered so high that torch counts forever", stock=False)
def _(members: Members, canary: Path) -> Members:
    return change(members, lambda d: d["range_constraints"].update(u999999999={"min_val": 0, "max_val": 9}))
