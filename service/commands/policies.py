"""`weightless policy`: what a policy file would decide, and why, without a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from exporter.contract.errors import InvalidRequest, WeightlessError
from service.commands.output import DONE, NOT_ALLOWED, Json, Output

if TYPE_CHECKING:
    from service.policy import Access, Caller

_CLAIMS_HINT = 'A file such as {"repository_id": "123", "ref": "refs/heads/main", "event_name": "push"}.'
app = typer.Typer(no_args_is_help=True, help="The policy file: what it decides, and why.")


@app.callback()
def policy() -> None:
    """The policy file: what it decides, and why."""


@app.command()
def check(
    claims: Annotated[Path, typer.Option("--claims", metavar="FILE", help="JSON: the claims of an OIDC token.")],
    file: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", envvar="WEIGHTLESS_POLICY", help="The policy (YAML).")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="May it export by this recipe?")] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="URI", help="May it export this source?")] = None,
    as_json: Json = False,
) -> None:
    """Explain which rule decides about a caller, and which condition of each other rule failed.

    Status 0 if the caller may do anything (with --recipe and --source: exactly that), else 4.

    \b
    Examples:
      weightless policy check --policy policy.yaml --claims claims.json --recipe muse-glimmer --source s3://models/m.pt2
    """
    from service.policy import load_policy

    output = Output(as_json)
    if file is None:
        raise InvalidRequest("no policy file is named", hint="Give --policy FILE, or set WEIGHTLESS_POLICY.")
    access = load_policy(file).access(_caller(claims))
    refusal = _refusal(access, recipe, source)
    for finding in access.findings:
        output.line(f"{'->' if finding.matched else '  '} rule {finding.rule + 1}: {finding.sentence}")
    allowed = bool(access.actions) and refusal is None
    output.line()
    if allowed:
        output.line(f"allowed: {', '.join(sorted(access.actions))}", "green")
    else:
        output.line(f"denied: {_reason(access, refusal)}{'' if refusal is None else f' ({refusal.message})'}", "red")
    matched = next((finding.rule for finding in access.findings if finding.matched), None)
    output.result(
        {
            "allowed": allowed,
            "rule": None if matched is None else matched + 1,
            "actions": sorted(access.actions),
            "reason": None if allowed else _reason(access, refusal),
            "findings": [
                {"rule": item.rule + 1, "matched": item.matched, "failed": item.failed, "sentence": item.sentence}
                for item in access.findings
            ],
        }
    )
    raise typer.Exit(DONE if allowed else NOT_ALLOWED)


def _reason(access: Access, refusal: WeightlessError | None) -> str:
    return access.reason if refusal is None else str(refusal.details.get("reason") or refusal.code)


def _caller(path: Path) -> Caller:
    from service.auth import github_caller

    try:
        claims: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", hint=_CLAIMS_HINT) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", hint=_CLAIMS_HINT) from error
    if not isinstance(claims, dict):
        raise InvalidRequest(f"{path} is not a JSON object of claims", hint=_CLAIMS_HINT)
    return github_caller(claims)


def _refusal(access: Access, recipe: str | None, source: str | None) -> WeightlessError | None:
    """Why the caller may not export that; what is not named is not asked about."""
    _check_names(recipe, source)
    try:
        if recipe is not None or source is not None:
            access.require("submit")
        if recipe is not None:
            access.require_recipe(recipe)
        if source is not None:
            access.require_source(source)
    except WeightlessError as error:
        return error
    return None


def _check_names(recipe: str | None, source: str | None) -> None:
    """`InvalidRequest` for a recipe or source that no request can hold."""
    from exporter.contract.spec import ExportRequest

    body = {"recipe": recipe or "any", "source": source or "s3://any", "target": {"backend": "cuda"}}
    try:
        ExportRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidRequest(
            f"--{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}", hint="No request can name it."
        ) from error
