"""Programs damaged at random: our own errors come out, or a program; never another exception, never a hang."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.errors import WeightlessError
from exporter.source.local import LocalTree
from exporter.source.pt2 import open_pt2
from tests.unit.attacks.archives import CONSTANTS, MODEL, WEIGHTS, Members, write_members

ROUNDS = 60
"""Documents for each seed; a failure names seed and round, which make the document again."""

JUNK: list[Any] = [
    None, True, 0, -1, 2**63, 2**64, 10**6, 1.5, "", "x", "s0", "cpu", "linear", "torch.ops.aten.sin.default", [], {},
    [1], [[[]]], {"a": 1}, {"as_int": 3}, {"as_none": True},
    {"as_tensor": {"name": "x"}}, {"as_tensor": {"name": "nope"}},
    {"as_expr": {"expr_str": "s0", "hint": None}},
]  # fmt: skip

Place = tuple[str | int, ...]


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where everything in a document is, the document itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key != "metadata":
            yield (*here, key)
            yield from places(inner, (*here, key))


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def damage(document: Any, chance: random.Random) -> None:
    """Replace, remove, move or repeat up to three things."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        everything = list(places(document))
        place, other = chance.choice(everything), chance.choice(everything)
        holder, key = at(document, place[:-1]), place[-1]
        kind = chance.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(chance.choice(JUNK))
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.9:
            holder[key] = copy.deepcopy(at(document, other))
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))  # type: ignore[index]
        else:
            holder["unknown"] = copy.deepcopy(holder[key])


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_program_is_refused_or_read(seed: int, victim: Members, tmp_path: Path) -> None:
    chance = random.Random(seed)
    refused = 0
    for number in range(ROUNDS):
        member = chance.choice([MODEL, MODEL, MODEL, WEIGHTS, CONSTANTS])
        document = json.loads(victim[member])
        damage(document, chance)
        path = tmp_path / "m.pt2"
        write_members(path, {**victim, member: json.dumps(document).encode()})
        try:
            open_pt2(LocalTree(str(path), str(path), [str(tmp_path)]), path.name)
        except WeightlessError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {number}: {member}") from error
    assert refused > ROUNDS // 2
