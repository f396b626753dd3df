"""The input and output structures of an exported program, rewritten so that torch's loader imports nothing.

A serialised `TreeSpec` may name any registered class, an enum or a `defaultdict` factory by module and attribute, and
torch imports them. Here containers of the standard library stay, and any other class becomes a tuple of its children,
which leaves the flat order of inputs and outputs as it was.
"""

from __future__ import annotations

import json
import re
from typing import Any

from exporter.source.expressions import Refused

MAX_DEPTH = 64
MAX_LENGTH = 4 * 2**20
"""Longest tree spec, in characters."""

KEY = re.compile(r"[A-Za-z0-9_ .:/@-]{1,200}", re.ASCII)
"""Keys of dicts among inputs and outputs: torch writes them into the source text of guards."""
_TUPLE, _LIST, _DICT = "builtins.tuple", "builtins.list", "builtins.dict"
_KEYED = (_DICT, "collections.OrderedDict")
_PLAIN = (_TUPLE, _LIST)


def clean_treespec(text: str) -> str:
    """The same structure with nothing but tuples, lists and dicts of plain keys; `Refused` if it cannot be read."""
    if len(text) > MAX_LENGTH:
        raise Refused("the tree spec is too long")
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("the tree spec is not JSON") from error
    if not isinstance(loaded, list) or len(loaded) != 2 or type(loaded[0]) is not int or loaded[0] != 1:
        raise Refused("the tree spec is of an unknown version")
    return json.dumps([1, _clean(loaded[1], 0)])


def _clean(spec: Any, depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH or not isinstance(spec, dict) or spec.keys() != {"type", "context", "children_spec"}:
        raise Refused("the tree spec is nested too deeply or malformed")
    kind, context, children = spec["type"], spec["context"], spec["children_spec"]
    if not isinstance(children, list) or not (kind is None or isinstance(kind, str)):
        raise Refused("the tree spec is malformed")
    if kind is None:
        if children or context is not None:
            raise Refused("the tree spec has a leaf with children")
        return {"type": None, "context": None, "children_spec": []}
    clean = [_clean(child, depth + 1) for child in children]
    if kind in _KEYED:
        return {"type": kind, "context": json.dumps(_keys(context, len(clean))), "children_spec": clean}
    return {"type": kind if kind in _PLAIN else _TUPLE, "context": "null", "children_spec": clean}


def _keys(context: Any, count: int) -> list[str | int]:
    try:
        keys = json.loads(context)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused("the tree spec has a dict whose keys cannot be read") from error
    if not isinstance(keys, list) or len(keys) != count or len({repr(key) for key in keys}) != count:
        raise Refused("the tree spec has a dict whose keys do not fit its children")
    for key in keys:
        if not (type(key) is int or (isinstance(key, str) and KEY.fullmatch(key))):
            raise Refused("the tree spec has a dict with a key that is not a plain string or number")
    return keys


def keyword_names(text: str) -> list[str | int]:
    """The keyword names of a cleaned input spec `(args, kwargs)`: torch writes them into a function's signature."""
    spec = json.loads(text)[1]
    children = spec["children_spec"]
    if spec["type"] != _TUPLE or len(children) != 2 or children[1]["type"] not in _KEYED:
        return []
    return list(json.loads(children[1]["context"]))
