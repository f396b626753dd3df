"""Reads `.pt2` archives of `torch.export.save` without running anything that is in them, and without their weights.

torch's own loader unpickles, evaluates and imports what an archive says, and copies every weight. Here the archive's
members stay where they are: the program's JSON is checked field by field (`program_schema`), the weights become mapped
or untouched storage read by range (`payload`), and the sample inputs go through the restricted unpickler (`samples`).
Layout of the archive: torch/export/pt2_archive/constants.py, the same in torch 2.11 to 2.13.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass
from torch.export import ExportedProgram

from exporter.contract.errors import InvalidRequest, SourceNotFound, SourceUnsafe, UnsupportedModel, WeightlessError
from exporter.source.archive import Archive
from exporter.source.payload import ArchiveWeights, Payload, read_payload
from exporter.source.ports import SourceTree
from exporter.source.program_schema import clean
from exporter.source.safetensors import strict_json
from exporter.source.samples import MAX_SAMPLES, Samples, load_samples

MAX_PROGRAM = 64 * 2**20
"""Largest JSON of a program or of its weights, in bytes."""

_MODELS = re.compile(r"models/([A-Za-z0-9_.-]{1,128})\.json", re.ASCII)
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_OLD = frozenset(("serialized_exported_program.json", "serialized_state_dict.pt", "serialized_state_dict.json"))
_AGAIN = "Export the model again and save it with torch.export.save of torch 2.11 or later."

log = logging.getLogger(__name__)


class Pt2(NamedTuple):
    """A program whose tensors are mapped or untouched, where their bytes are, and its sample inputs, if it has any."""

    program: ExportedProgram
    weights: ArchiveWeights
    samples: Samples | None


def open_pt2(tree: SourceTree, name: str, model: str | None = None) -> Pt2:
    """The program called `model` in an archive of `tree`; by default the only one.

    Host memory: the JSON and what torch makes of it, sample inputs, no weights. Raises `SourceUnsafe`,
    `SourceNotFound`, `UnsupportedModel` (operators that are not installed) or `InvalidRequest` (which program?).
    """
    archive = _open(tree, name)
    models = _models(archive)
    if model is None and len(models) > 1:
        raise InvalidRequest(
            f"{name} holds several programs: {', '.join(models)[:300]}.", hint="Say which one is to be exported."
        )
    if model is None:
        model = models[0]
    if model not in models:
        raise InvalidRequest(f"{name} holds no program called {model[:100]!r}, but {', '.join(models)[:300]}.")
    return _load(archive, model)


def pt2_models(tree: SourceTree, name: str) -> tuple[str, ...]:
    """The names of the programs in an archive, sorted."""
    return _models(_open(tree, name))


def _open(tree: SourceTree, name: str) -> Archive:
    archive = Archive(tree.open(name), name)
    if not _OLD.isdisjoint(archive.members()):
        raise SourceUnsafe(f"{name} is of an older torch, with its weights pickled.", hint=_AGAIN, file=name)
    if "archive_format" not in archive or archive.read("archive_format", 16) != b"pt2":
        raise SourceUnsafe(f"{name} is not a .pt2 archive of torch.export.save.", hint=_AGAIN, file=name)
    if archive.read("archive_version", 16) != b"0":
        raise SourceUnsafe(f"{name} is of an unknown archive version.", hint=_AGAIN, file=name)
    if "byteorder" in archive and archive.read("byteorder", 16) != b"little":
        raise SourceUnsafe(f"{name} was saved on a big-endian machine.", hint=_AGAIN, file=name)
    if compiled := next((member for member in archive.members() if member.startswith("data/aotinductor/")), None):
        raise SourceUnsafe(f"{name} holds compiled code ({compiled[:100]}).", hint=_AGAIN, file=name)
    return archive


def _models(archive: Archive) -> tuple[str, ...]:
    found = sorted(match[1] for member in archive.members() if (match := _MODELS.fullmatch(member)))
    if not found:
        raise SourceNotFound(f"{archive.name} holds no exported program.", hint=_AGAIN, file=archive.name)
    return tuple(found)


def _json(archive: Archive, member: str, cls: type) -> dict[str, Any]:
    what = f"{archive.name}: {member}"
    data = strict_json(archive.read(member, MAX_PROGRAM), what)
    checked: dict[str, Any] = clean(cls, data, what)
    return checked


def _payloads(archive: Archive, folder: str, model: str, kind: str) -> dict[str, Payload]:
    if f"{folder}{model}.pt" in archive:
        raise SourceUnsafe(f"{archive.name} has its {kind} pickled in one file.", hint=_AGAIN, file=archive.name)
    for member in archive.members():
        if member.startswith((f"{folder}custom_obj_", f"{folder}opaque_obj_")):
            raise SourceUnsafe(
                f"{archive.name} holds a pickled object ({member}).",
                hint="Custom and opaque objects are not read: export a program whose constants are plain tensors.",
                file=archive.name,
            )
    config = _json(archive, f"{folder}{model}_{kind}_config.json", schema.PayloadConfig)["config"]
    return {name: read_payload(name, meta, folder, archive) for name, meta in config.items()}


def _load(archive: Archive, model: str) -> Pt2:
    state = _payloads(archive, _WEIGHTS, model, "weights")
    constants = _payloads(archive, _CONSTANTS, model, "constants")
    data = _json(archive, f"models/{model}.json", schema.ExportedProgram)
    if both := state.keys() & constants.keys():
        raise SourceUnsafe(f"{archive.name} has {min(both)!r} both as a weight and as a constant.", file=archive.name)
    _check_version(archive, data)
    member = f"data/sample_inputs/{model}.pt"
    samples = (
        load_samples(archive.read(member, MAX_SAMPLES), f"{archive.name}: {member}") if member in archive else None
    )
    weights = ArchiveWeights(archive, {**state, **constants})
    _check_signature(archive, data, state, constants)
    program = _deserialize(
        archive,
        data,
        {name: weights.tensor(name) for name in state},
        {name: weights.tensor(name) for name in constants},
        samples,
    )
    return Pt2(program, weights, samples)


def _check_version(archive: Archive, data: Mapping[str, Any]) -> None:
    major = data["schema_version"]["major"]
    if major != schema.SCHEMA_VERSION[0]:
        raise UnsupportedModel(
            f"{archive.name} was saved by torch {data.get('torch_version', 'of another version')} in schema {major}; "
            f"torch {torch.__version__} reads schema {schema.SCHEMA_VERSION[0]}.",
            hint="Export the model again with the torch that the exporter has.",
        )


def _check_signature(
    archive: Archive, data: Mapping[str, Any], state: Mapping[str, Payload], constants: Mapping[str, Payload]
) -> None:
    """Every lifted input has its tensor, of the same dtype and shape."""
    graph = data["graph_module"]["graph"]
    for spec in data["graph_module"]["signature"]["input_specs"]:
        ((kind, value),) = spec.items()
        if kind not in ("parameter", "buffer", "tensor_constant"):
            continue
        fqn = value.get("parameter_name") or value.get("buffer_name") or value.get("tensor_constant_name")
        payload = state.get(fqn) or constants.get(fqn)
        meta = graph["tensor_values"].get(value["arg"]["name"])
        if payload is None:
            raise SourceNotFound(f"{archive.name} has no weights for {fqn}.", file=archive.name, tensor=fqn)
        sizes = None if meta is None else [size.get("as_int") for size in meta["sizes"]]
        if sizes != list(payload.shape):
            raise SourceUnsafe(
                f"{archive.name}: {fqn} has shape {list(payload.shape)}, but the program expects {sizes}.",
                file=archive.name,
                tensor=fqn,
            )


def _deserialize(
    archive: Archive,
    data: Mapping[str, Any],
    state: dict[str, torch.Tensor],
    constants: dict[str, torch.Tensor],
    samples: Samples | None,
) -> ExportedProgram:
    program = _dict_to_dataclass(schema.ExportedProgram, data)  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ExportedProgramDeserializer().deserialize(program, state, constants, samples)  # type: ignore[arg-type]
    except (WeightlessError, MemoryError):
        raise
    except Exception as error:
        log.debug("torch refused %s", archive.name, exc_info=error)
        raise SourceUnsafe(
            f"torch {torch.__version__} cannot rebuild the program in {archive.name}: "
            f"{type(error).__name__}: {_last_line(error)}.",
            hint=_AGAIN,
            file=archive.name,
        ) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "no message")[:300].rstrip(".")
