"""No archive of doors.py gets anything run; those marked `stock` do with torch's own loader."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._export.serde import schema
from torch._export.serde.union import _Union

from exporter.contract.errors import SourceUnsafe
from exporter.source.local import LocalTree
from exporter.source.program_schema import RULES, _hints
from exporter.source.pt2 import Pt2, open_pt2
from tests.unit.attacks.archives import Members, write_members
from tests.unit.attacks.doors import DOORS, Door

ROOT = Path(__file__).parents[3]

# Opens every archive as torch.export.load does, and runs its module once; prints nothing that is relied upon.
STOCK = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch
def attempt(step):
    try:
        step()
    except BaseException as error:
        print(path, type(error).__name__, str(error)[-300:], file=sys.stderr)

def run_module():
    args, kwargs = program.example_inputs
    program.module()(*args, **kwargs)

for path in json.loads(sys.argv[1]):
    sys.path.insert(0, str(pathlib.Path(path).parent))
    try:
        program = torch.export.load(path)
    except BaseException as error:
        print(path, type(error).__name__, str(error)[-300:], file=sys.stderr)
        continue
    attempt(run_module)
    nothing = [None] * len(program.graph_signature.input_specs)
    attempt(lambda: program.graph_module(*nothing))
    attempt(lambda: torch.fx.Interpreter(program.graph_module).run(*nothing))
"""


def build(door: Door, victim: Members, folder: Path) -> tuple[Path, Path]:
    """The altered archive and the canary that it would make; the folder also has a module that makes it on import."""
    canary = folder / f"canary_{DOORS.index(door)}"
    path = folder / f"door_{DOORS.index(door)}.pt2"
    write_members(path, door.alter(victim, canary))
    source = f"import enum, pathlib\npathlib.Path({str(canary)!r}).touch()\nEnum = enum.Enum('Enum', 'A')\n"
    (folder / f"{canary.stem}_module.py").write_text(source)
    return path, canary


def opened(path: Path) -> Pt2:
    return open_pt2(LocalTree(str(path), str(path), [str(path.parent)]), path.name)


def use(path: Path) -> None:
    """Open an archive and run its module once, as an export does."""
    pt2 = opened(path)
    args, kwargs = pt2.samples or ((), {})
    pt2.program.module()(*args, **kwargs)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name.replace(" ", "-"))
def test_a_door_is_closed(door: Door, victim: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, canary = build(door, victim, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if door.defused:
        use(path)
    else:
        with pytest.raises(SourceUnsafe, match=path.name) as caught:
            use(path)
        assert caught.value.hint
    assert not canary.exists()


def test_plain_torch_walks_through_the_doors_marked_stock(victim: Members, tmp_path: Path) -> None:
    built = {door.name: build(door, victim, tmp_path) for door in DOORS if door.stock}
    paths = json.dumps([str(path) for path, _ in built.values()])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", STOCK, paths], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    shut = [name for name, (_, canary) in built.items() if not canary.exists()]
    assert not shut, child.stderr[-6000:]


def test_every_string_of_the_schema_has_a_rule() -> None:
    missing: set[tuple[str, str]] = set()
    seen: set[type] = set()

    def visit(cls: object, place: tuple[str, str]) -> None:
        inner = getattr(cls, "__args__", None)
        if inner:
            if getattr(cls, "__origin__", None) is dict and place not in RULES:
                missing.add(place)
            for item in inner[1:] if getattr(cls, "__origin__", None) is dict else inner:
                visit(item, place)
        elif cls is str and place not in RULES:
            missing.add(place)
        elif isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, _Union)) and cls not in seen:
            seen.add(cls)
            for field in dataclasses.fields(cls):
                visit(_hints(cls)[field.name], (cls.__name__, field.name))

    visit(schema.ExportedProgram, ("", ""))
    visit(schema.PayloadConfig, ("", ""))
    assert len(seen) > 30
    assert not missing


def test_the_victim_itself_is_read_and_runs(victim: Members, tmp_path: Path) -> None:
    path = tmp_path / "victim.pt2"
    write_members(path, victim)
    pt2 = opened(path)
    assert pt2.samples is not None
    assert pt2.program.module()(*pt2.samples[0], **pt2.samples[1]).shape == (3, 4)
