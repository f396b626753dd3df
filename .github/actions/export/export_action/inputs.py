"""The action's inputs, read from the environment and checked before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from exporter.contract.base import parse_duration
from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import ExportRequest

_MAXIMA = {
    "MAX_HOST_MEMORY": "hostMemory",
    "MAX_GPU_MEMORY": "gpuMemory",
    "MAX_SCRATCH_DISK": "scratchDisk",
    "MAX_WALL_TIME": "wallTime",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the step was asked to do. `body` is the request; an empty `token` means the job's OIDC token."""

    service_url: str
    body: Mapping[str, Any]
    wait: bool
    timeout: int | None
    pull: str
    compare_with: str
    audience: str
    token: str


def read_inputs(environment: Mapping[str, str]) -> Inputs:
    """The inputs; `InvalidRequest` names the first that is wrong."""

    def value(name: str, default: str = "") -> str:
        return environment.get(f"INPUT_{name}", "").strip() or default

    for name in ("SERVICE_URL", "RECIPE", "SOURCE"):
        if not value(name):
            raise _wrong(name, "is required")
    budgets = _object("BUDGETS", value("BUDGETS", "{}"))
    budgets.update({key: value(name) for name, key in _MAXIMA.items() if value(name)})
    body = {
        "recipe": value("RECIPE"),
        "source": value("SOURCE"),
        "options": _object("OPTIONS", value("OPTIONS", "{}")),
        "target": _object("TARGET", value("TARGET", '{"backend": "cuda"}')),
        "budgets": budgets,
        "labels": _object("LABELS", value("LABELS", "{}")),
        "priority": _integer("PRIORITY", value("PRIORITY", "0")),
        "verify": _boolean("VERIFY", value("VERIFY", "true")),
        "reuseWeights": _boolean("REUSE_WEIGHTS", value("REUSE_WEIGHTS", "true")),
    }
    _check(body)
    return Inputs(
        service_url=_url(value("SERVICE_URL")),
        body=body,
        wait=_boolean("WAIT", value("WAIT", "true")),
        timeout=_duration("TIMEOUT", value("TIMEOUT")),
        pull=value("PULL"),
        compare_with=value("COMPARE_WITH", "previous"),
        audience=value("AUDIENCE"),
        token=value("TOKEN"),
    )


def _wrong(name: str, problem: str) -> InvalidRequest:
    shown = name.lower().replace("_", "-")
    return InvalidRequest(
        f"the input {shown} {problem}", hint="Look at the inputs in the action's action.yml.", field=shown
    )


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _wrong("SERVICE_URL", "is not an http or https URL")
    return text.rstrip("/")


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(name, "is not a JSON object")
    return found


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _wrong(name, "is neither true nor false")
    return text.lower() == "true"


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,6}", text, re.ASCII):
        raise _wrong(name, "is not an integer")
    return int(text)


def _duration(name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise _wrong(name, "is not a duration such as 90s or 2h") from error


def _check(body: Mapping[str, Any]) -> None:
    try:
        ExportRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidRequest(f"{where}: {message}" if where else message) from error
