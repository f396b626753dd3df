"""Checks the JSON of an exported program field by field against torch's own schema, before torch reads it.

Every string field of the schema has a rule here, and a field without one (of a newer torch) is refused: what torch
evaluates, imports, looks up or writes into generated source is all in strings. The result is a copy that holds known
fields only.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import math
import re
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from torch._export.serde import schema
from torch._export.serde.union import _Union

from exporter.contract.errors import SourceUnsafe
from exporter.source.expressions import MAX_LENGTH, Refused, check_expression, check_guard
from exporter.source.targets import check_target
from exporter.source.treespec import KEY, clean_treespec, keyword_names

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}", re.ASCII)
_FQN = re.compile(r"[A-Za-z0-9_@:+ /-]{1,256}(\.[A-Za-z0-9_@:+ /-]{1,256}){0,63}", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9 _.,:;()\[\]<>=+*/%!?#&|~^@-]{0,4096}", re.ASCII)
_PAYLOAD = re.compile(r"(weight|tensor)_[0-9]{1,9}", re.ASCII)
_STACK = re.compile(r"[A-Za-z0-9_.,;@\[\]()<>':+ -]{0,65536}", re.ASCII)
_VERIFIERS = frozenset(("ATEN", "TRAINING"))
MAX_UNBACKED = 100_000
"""Highest number of an unbacked symbol: torch counts up to it, one by one."""


def _refuse(why: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        raise Refused(why)

    return rule


def _name(text: str) -> str:
    """An identifier: torch writes names of nodes and arguments into the source of a function."""
    if not _NAME.fullmatch(text) or keyword.iskeyword(text):
        raise Refused("it is not a plain identifier")
    return text


def _maybe_name(text: str) -> str:
    return text if text == "" else _name(text)


def _fqn(text: str) -> str:
    parts = text.split(".")
    if not _FQN.fullmatch(text) or any(part.startswith("__") and part.endswith("__") for part in parts):
        raise Refused("it is not a plain dotted name")
    return text


def _text(text: str) -> str:
    """A string argument: code generators of back ends write these between quotes."""
    if not _TEXT.fullmatch(text):
        raise Refused("a string argument has quotes, escapes or characters outside of ASCII")
    return text


def _expression(text: str) -> str:
    check_expression(text)
    return text


def _range_key(text: str) -> str:
    check_expression(text)
    match = re.match(r"(?:u|zuf)([0-9]+)", text)
    if match and int(match[1]) > MAX_UNBACKED:
        raise Refused("it numbers an unbacked symbol absurdly high")
    return text


def _guard(text: str) -> str:
    check_guard(text)
    return text


def _target(text: str) -> str:
    if len(text) > 512:
        raise Refused("a target has more than 512 characters")
    check_target(text)
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        if text not in allowed:
            raise Refused(f"it is none of {', '.join(allowed)}")
        return text

    return rule


def _matches(pattern: re.Pattern[str], why: str) -> Callable[[str], str]:
    def rule(text: str) -> str:
        if not pattern.fullmatch(text):
            raise Refused(why)
        return text

    return rule


def _to_cpu(text: str) -> str:
    """Programs are lowered from CPU tensors, whatever device they were exported on."""
    _one_of("cpu", "cuda")(text)
    return "cpu"


_key = _matches(KEY, "a key is not a plain string")
_version = _matches(re.compile(r"[A-Za-z0-9_.+<>= -]{0,64}", re.ASCII), "it is not a version")
_custom = _refuse("custom and opaque objects are not read")

RULES: dict[tuple[str, str], Callable[[str], str]] = {
    ("Device", "type"): _to_cpu,
    ("SymExpr", "expr_str"): _expression,
    ("SymIntArgument", "as_name"): _name,
    ("SymFloatArgument", "as_name"): _name,
    ("SymBoolArgument", "as_name"): _name,
    ("TensorArgument", "name"): _name,
    ("TokenArgument", "name"): _refuse("effect tokens are not read"),
    ("GraphArgument", "name"): _name,
    ("CustomObjArgument", "name"): _custom,
    ("CustomObjArgument", "class_fqn"): _custom,
    ("Argument", "as_string"): _text,
    ("Argument", "as_strings"): _text,
    ("Argument", "as_operator"): _target,
    ("Argument", "as_string_to_argument"): _key,
    ("NamedArgument", "name"): _maybe_name,
    ("Node", "target"): _target,
    ("Node", "metadata"): _matches(_STACK, "metadata has odd characters"),
    ("Node", "name"): _maybe_name,
    ("Graph", "tensor_values"): _name,
    ("Graph", "sym_int_values"): _name,
    ("Graph", "sym_bool_values"): _name,
    ("Graph", "sym_float_values"): _name,
    ("Graph", "custom_obj_values"): _custom,
    ("ConstantValue", "as_string"): _text,
    ("InputToConstantInputSpec", "name"): _name,
    ("InputToParameterSpec", "parameter_name"): _fqn,
    ("InputToBufferSpec", "buffer_name"): _fqn,
    ("InputToTensorConstantSpec", "tensor_constant_name"): _fqn,
    ("InputToCustomObjSpec", "custom_obj_name"): _custom,
    ("BufferMutationSpec", "buffer_name"): _fqn,
    ("ParameterMutationSpec", "parameter_name"): _fqn,
    ("GradientToParameterSpec", "parameter_name"): _fqn,
    ("GradientToUserInputSpec", "user_input_name"): _name,
    ("UserInputMutationSpec", "user_input_name"): _name,
    ("ModuleCallEntry", "fqn"): lambda text: text if text == "" else _fqn(text),
    ("ModuleCallSignature", "in_spec"): clean_treespec,
    ("ModuleCallSignature", "out_spec"): clean_treespec,
    ("ModuleCallSignature", "forward_arg_names"): _name,
    ("NamedTupleDef", "field_names"): _name,
    ("GraphModule", "metadata"): _refuse("metadata of the graph is not read"),
    ("GraphModule", "treespec_namedtuple_fields"): _refuse("named tuples are not read"),
    ("ExportedProgram", "opset_version"): _name,
    ("ExportedProgram", "range_constraints"): _range_key,
    ("ExportedProgram", "verifiers"): _one_of(*sorted(_VERIFIERS)),
    ("ExportedProgram", "torch_version"): _version,
    ("ExportedProgram", "guards_code"): _guard,
    ("PayloadMeta", "path_name"): _matches(_PAYLOAD, "it is not the name of a raw weight"),
    ("PayloadConfig", "config"): _fqn,
}
"""What each string of the schema must be, by class and field; for maps the rule is that of the keys too."""

_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_MESSAGES = ("msg", "assert_msg")
_KEPT_METADATA = ("nn_module_stack", "torch_fn")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema), include_extras=False)


class _Place:
    """Where in the JSON the check is; spelled out only for an error."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []

    def unsafe(self, problem: str) -> SourceUnsafe:
        where = "".join(char if char.isprintable() else "?" for char in ".".join(self.path))[-300:]
        return SourceUnsafe(f"{self.what}: {where or 'the document'}: {problem}.", place=where)


def clean(cls: Any, data: Any, what: str) -> Any:
    """A copy of `data` that fits the schema class `cls` in every field, or `SourceUnsafe` with the place in `what`."""
    place = _Place(what)
    try:
        return _clean(cls, data, place, ("", ""))
    except RecursionError as error:
        raise place.unsafe("it is nested too deeply") from error


def _clean(cls: Any, data: Any, place: _Place, rule: tuple[str, str]) -> Any:
    origin = typing.get_origin(cls)
    if origin is Annotated:
        return _clean(typing.get_args(cls)[0], data, place, rule)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(cls) if arg is not type(None)]
        return None if data is None else _clean(inner[0], data, place, rule)
    if origin is list:
        return _clean_list(typing.get_args(cls)[0], data, place, rule)
    if origin is dict:
        return _clean_map(typing.get_args(cls)[1], data, place, rule)
    if isinstance(cls, type) and issubclass(cls, _Union):
        return _clean_union(cls, data, place)
    if dataclasses.is_dataclass(cls):
        return _clean_dataclass(typing.cast(type, cls), data, place)
    return _clean_scalar(cls, data, place, rule)


def _clean_list(item: Any, data: Any, place: _Place, rule: tuple[str, str]) -> list[Any]:
    if not isinstance(data, list):
        raise place.unsafe("it is not a list")
    result = []
    for index, value in enumerate(data):
        place.path.append(str(index))
        result.append(_clean(item, value, place, rule))
        place.path.pop()
    return result


def _clean_map(item: Any, data: Any, place: _Place, rule: tuple[str, str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise place.unsafe("it is not a map")
    result = {}
    for key, value in data.items():
        place.path.append(key[:100])
        clean_key = _clean_scalar(str, key, place, rule)
        result[clean_key] = _clean(item, value, place, rule)
        place.path.pop()
    return result


def _clean_union(cls: type, data: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(data, dict) or len(data) != 1:
        raise place.unsafe(f"it is not one alternative of {cls.__name__}")
    tag, value = next(iter(data.items()))
    if tag not in {field.name for field in dataclasses.fields(cls)}:
        raise place.unsafe(f"{tag[:60]!r} is no alternative of {cls.__name__}")
    place.path.append(tag)
    result = {tag: _clean(_hints(cls)[tag], value, place, (cls.__name__, tag))}
    place.path.pop()
    return result


def _clean_dataclass(cls: type, data: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise place.unsafe(f"it is not a {cls.__name__}")
    data = _PREPARE.get(cls.__name__, dict)(data)
    result = {}
    for field in dataclasses.fields(cls):
        place.path.append(field.name)
        if field.name in data:
            value = data[field.name]
            result[field.name] = _clean(_hints(cls)[field.name], value, place, (cls.__name__, field.name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise place.unsafe("it is missing")
        place.path.pop()
    if cls.__name__ == "ModuleCallSignature":
        for name in keyword_names(result["in_spec"]):
            _clean_scalar(str, name, place, ("ModuleCallSignature", "forward_arg_names"))
    return result


def _clean_scalar(cls: Any, data: Any, place: _Place, rule: tuple[str, str]) -> Any:
    if cls is str:
        if not isinstance(data, str) or len(data) > 4 * 2**20:
            raise place.unsafe("it is not a string")
        if rule not in RULES:
            raise place.unsafe("this version does not know the field")
        try:
            return RULES[rule](data)
        except Refused as error:
            shown = data if len(data) <= 120 else data[:117] + "..."
            raise place.unsafe(f"{error} ({shown!r})") from error
    if cls is bool and isinstance(data, bool):
        return data
    if cls is int and type(data) is int and abs(data) < 2**64:
        return data
    if cls is float:
        if isinstance(data, str) and data in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[data]
        if type(data) in (int, float) and abs(data) < 2**1023:
            return float(data)
    if isinstance(cls, type) and issubclass(cls, enum.IntEnum) and type(data) is int:
        if data in {int(member) for member in cls}:
            return data
        raise place.unsafe(f"{data} is no {cls.__name__}")
    raise place.unsafe(f"it is not of type {getattr(cls, '__name__', cls)}")


def _prepare_node(data: dict[str, Any]) -> dict[str, Any]:
    """Metadata that is only for people and debuggers is dropped: torch looks names in it up, and prints it as code."""
    metadata = data.get("metadata")
    kept = {}
    if isinstance(metadata, dict):
        for key in _KEPT_METADATA:
            value = metadata.get(key)
            if isinstance(value, str) and _STACK.fullmatch(value) and _well_formed(key, value):
                kept[key] = value
    return {**data, "metadata": kept}


def _well_formed(key: str, value: str) -> bool:
    return key != "nn_module_stack" or all(len(_split(item)) == 3 for item in value.split(";"))


def _split(item: str) -> list[str]:
    """The parts of one entry of `nn_module_stack`: key, path, type, parted by commas outside of brackets."""
    parts, depth = [""], 0
    for char in item:
        depth += (char in "[(") - (char in ")]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _prepare_argument(data: dict[str, Any]) -> dict[str, Any]:
    """Messages of assertions are free text: quotes and line ends in them are replaced, not refused."""
    arg = data.get("arg")
    if data.get("name") in _MESSAGES and isinstance(arg, dict) and isinstance(arg.get("as_string"), str):
        text = "".join(char if _TEXT.fullmatch(char) else " " for char in arg["as_string"][:MAX_LENGTH])
        return {**data, "arg": {"as_string": text[:4096]}}
    return data


def _prepare_graph_module(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "metadata": {}, "treespec_namedtuple_fields": {}}


def _prepare_program(data: dict[str, Any]) -> dict[str, Any]:
    """A program without a verifier would not be verified at all."""
    return {**data, "verifiers": data.get("verifiers") or ["TRAINING"]}


def _prepare_device(data: dict[str, Any]) -> dict[str, Any]:
    return {"type": data.get("type"), "index": None}


_PREPARE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Node": _prepare_node,
    "NamedArgument": _prepare_argument,
    "GraphModule": _prepare_graph_module,
    "Device": _prepare_device,
    "ExportedProgram": _prepare_program,
}
