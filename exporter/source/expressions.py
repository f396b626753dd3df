"""The strings of an exported program that torch evaluates as Python, checked before torch sees them.

`expr_str` goes to `sympy.sympify`, which is `eval`; guards are put into a function that is `exec`'d. Both are parsed
here with `ast`, which runs nothing, and pass only if every node is on a short list. Numbers are bounded too: an
innocent looking power can take all memory.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

MAX_LENGTH = 20_000
"""Longest expression or guard, in characters."""
MAX_NODES = 4_000
MAX_BITS = 4_096
"""Bound of the size of any integer that an expression can reach when its symbols are 64-bit, in bits."""
MAX_EXPONENT = 64


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


SYMBOL = re.compile(r"_?[a-z]{1,4}[0-9]{1,9}", re.ASCII)
"""Names that torch gives to symbols: s0, u3, zf2."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_OPAQUE = re.compile(r"(OpaqueUnaryFn|BitwiseFn)_[a-z0-9_]{1,30}", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_ .-]{1,200}", re.ASCII)

_ASSUMPTIONS = words(
    "integer positive nonnegative negative nonpositive real extended_real rational zero nonzero even odd finite "
    "commutative complex"
)
_FUNCTIONS = words(
    "Add Mul Max Min Abs floor ceiling sqrt Eq Equality Ne Unequality Lt StrictLessThan Gt StrictGreaterThan Le "
    "LessThan Ge GreaterThan And Or Not Piecewise ExprCondPair Where FloorDiv ModularIndexing PythonMod Mod "
    "CleanDiv CeilToInt FloorToInt CeilDiv FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat "
    "TruncToInt RoundToInt RoundDecimal ToFloat Identity Tuple"
)
_POWERS = words("Pow PowByNatural FloatPow LShift")
_GUARD_FUNCTIONS = words(
    "len int float bool max min abs round math.ceil math.floor math.trunc math.sqrt math.isnan math.pow "
    "torch.sym_float torch.sym_int torch.sym_not torch.sym_max torch.sym_min torch.sym_ite torch.sym_sqrt "
    "torch._sym_sqrt cast_symbool_to_symint_guardless IsNonOverlappingAndDenseIndicator"
)
_GUARD_METHODS = words("size stride storage_offset")
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.RShift)
_UNARY = (ast.UAdd, ast.USub, ast.Not, ast.Invert)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Refused(ValueError):
    """Why a string of the program may not be given to torch."""


def check_expression(text: str) -> None:
    """Refuse what is not a plain symbolic expression as torch writes them (`sympy.srepr`, or infix in old archives)."""
    _cached(text, _expression)


def check_guard(text: str) -> None:
    """Refuse what is not a comparison over input sizes, strides and constants, as torch writes its guards."""
    _cached(text, _guard)


@lru_cache(maxsize=4096)
def _cached(text: str, bits: Callable[[ast.expr], int]) -> None:
    try:
        bits(_parse(text))
    except RecursionError as error:
        raise Refused("it is nested too deeply") from error


def _parse(text: str) -> ast.expr:
    if (
        not text
        or len(text) > MAX_LENGTH
        or not text.isascii()
        or not text.isprintable()
        or "\\" in text
        or "#" in text
    ):
        raise Refused("it is empty, too long, or has characters that expressions do not have")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused("it does not parse") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise Refused("it has too many terms")
    return tree.body


def _bounded(bits: int) -> int:
    if bits > MAX_BITS:
        raise Refused("it can reach numbers without bound")
    return bits


def _literal(node: ast.expr) -> int | None:
    """The value of an integer literal, bare or wrapped in `Integer`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _literal(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer":
        return _literal(node.args[0]) if len(node.args) == 1 and not node.keywords else None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _power(base: ast.expr, exponent: ast.expr, visit: Callable[[ast.expr], int]) -> int:
    visit(exponent)
    value = _literal(exponent)
    if value is None:
        # Roots are written as rational powers; they do not grow. Anything else could.
        if isinstance(exponent, ast.Call) and isinstance(exponent.func, ast.Name) and exponent.func.id == "Rational":
            top, bottom = (_literal(arg) or 0 for arg in exponent.args)
            if abs(top) <= abs(bottom):
                return visit(base)
        raise Refused("it has a power whose exponent is not a small number")
    if abs(value) > MAX_EXPONENT:
        raise Refused("it has a power whose exponent is not a small number")
    return _bounded(visit(base) * max(1, abs(value)))


def _arithmetic(node: ast.expr, visit: Callable[[ast.expr], int]) -> int:
    """Size in bits of what the operators shared by expressions and guards can reach."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return _bounded(node.value.bit_length() if isinstance(node.value, int) else 64)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node.left, node.right, visit)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        shift = _literal(node.right)
        if shift is None or not 0 <= shift <= MAX_EXPONENT:
            raise Refused("it shifts by something other than a small number")
        return _bounded(visit(node.left) + shift)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _BINARY):
        return _bounded(visit(node.left) + visit(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, _UNARY):
        return visit(node.operand)
    if isinstance(node, ast.BoolOp):
        return max(visit(value) for value in node.values)
    if isinstance(node, ast.Compare) and all(isinstance(op, _COMPARE) for op in node.ops):
        return max(visit(value) for value in (node.left, *node.comparators))
    raise Refused(f"it has a {type(node).__name__}, which expressions do not have")


def _expression(node: ast.expr) -> int:
    if isinstance(node, ast.Name):
        if SYMBOL.fullmatch(node.id) or node.id in ("true", "false", "oo", "int_oo"):
            return 64
        raise Refused(f"it names {node.id[:40]!r}")
    if isinstance(node, ast.Tuple):
        return max((_expression(item) for item in node.elts), default=1)
    if isinstance(node, ast.Call):
        return _call(node)
    return _arithmetic(node, _expression)


def _call(node: ast.Call) -> int:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    args = node.args
    if name == "Symbol":
        return _symbol(node)
    if name == "Float":
        return _float(node)
    if node.keywords:
        raise Refused("it calls something with keywords")
    if name in ("Integer", "Rational"):
        values = [_literal(arg) for arg in args]
        if len(values) != (1 if name == "Integer" else 2) or None in values or (name == "Rational" and not values[1]):
            raise Refused(f"it has a {name} of something other than numbers")
        return _bounded(max(value.bit_length() for value in values if value is not None))
    if name in _POWERS:
        if len(args) != 2:
            raise Refused(f"it has a {name} without base and exponent")
        return _power(args[0], args[1], _expression)
    if name in _FUNCTIONS or _OPAQUE.fullmatch(name):
        sizes = [_expression(arg) for arg in args]
        return _bounded(sum(sizes) if name == "Mul" else max(sizes, default=1) + len(sizes))
    raise Refused(f"it calls {name[:40]!r}" if name else "it calls something that has no plain name")


def _symbol(node: ast.Call) -> int:
    first = node.args[0] if len(node.args) == 1 else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or not SYMBOL.fullmatch(first.value):
        raise Refused("it has a Symbol with a name that torch does not give")
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg not in _ASSUMPTIONS or not isinstance(value, ast.Constant) or value.value not in (True, False):
            raise Refused("it has a Symbol with unknown assumptions")
    return 64


def _float(node: ast.Call) -> int:
    first = node.args[0] if len(node.args) == 1 else None
    text = str(first.value) if isinstance(first, ast.Constant) else ""
    if not _NUMBER.fullmatch(text):
        raise Refused("it has a Float that is not a number")
    for keyword in node.keywords:
        precision = _literal(keyword.value)
        if keyword.arg not in ("precision", "dps") or precision is None or not 1 <= precision <= 256:
            raise Refused("it has a Float with an odd precision")
    return 64


def _guard(node: ast.expr) -> int:
    if isinstance(node, ast.Name) and (SYMBOL.fullmatch(node.id) or node.id == "inf"):
        return 64
    if isinstance(node, ast.Subscript | ast.Call) and _is_input(node):
        return 64
    if isinstance(node, ast.Call):
        name = _dotted(node.func)
        if name in _GUARD_FUNCTIONS and not node.keywords:
            if name == "math.pow":
                return _power(node.args[0], node.args[1], _guard) if len(node.args) == 2 else _bounded(MAX_BITS + 1)
            return _bounded(max((_guard(arg) for arg in node.args), default=1) + len(node.args))
        raise Refused(f"it calls {name[:40]!r}")
    if isinstance(node, ast.Attribute) and _dotted(node) in ("math.inf", "math.nan"):
        return 64
    if isinstance(node, ast.Constant) and node.value is None:
        return 1
    if isinstance(node, ast.IfExp):
        return max(_guard(part) for part in (node.test, node.body, node.orelse))
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return max(_guard(value) for value in (node.left, *node.comparators))
    return _arithmetic(node, _guard)


def _is_input(node: ast.expr) -> bool:
    """An input or a part of one: ``L['x']['k'][0]``, or its ``.size()[1]``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript) and _is_key(node.slice):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _GUARD_METHODS
            and not node.args
            and not node.keywords
        ):
            node = node.func.value
        else:
            return False
    return node.id == "L"


def _is_key(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant):
        return False
    value = node.value
    return type(value) is int or (isinstance(value, str) and _KEY.fullmatch(value) is not None)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def check_all(texts: Sequence[str], check: Callable[[str], None]) -> None:
    """Run `check` over several strings."""
    for text in texts:
        check(text)
