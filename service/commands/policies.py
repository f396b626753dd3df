"""`weightless policy`: what a policy file would decide, and why, without a service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exporter.contract.errors import InvalidRequest, WeightlessError
from service.commands.output import DONE, NOT_ALLOWED, Json, Output

if TYPE_CHECKING:
    from service.policy import Access, Caller

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
        reason = access.reason if refusal is None else str(refusal.details.get("reason"))
        output.line(f"denied: {reason}{'' if refusal is None else f' ({refusal.message})'}", "red")
    matched = next((finding.rule for finding in access.findings if finding.matched), None)
    output.result(
        {
            "allowed": allowed,
            "rule": None if matched is None else matched + 1,
            "actions": sorted(access.actions),
            "reason": None if allowed else (access.reason if refusal is None else refusal.details.get("reason")),
            "findings": [
                {"rule": item.rule + 1, "matched": item.matched, "failed": item.failed, "sentence": item.sentence}
                for item in access.findings
            ],
        }
    )
    raise typer.Exit(DONE if allowed else NOT_ALLOWED)


def _caller(path: Path) -> Caller:
    from service.auth import github_caller

    try:
        claims: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(claims, dict):
        raise InvalidRequest(f"{path} is not a JSON object of claims")
    return github_caller(claims)


def _refusal(access: Access, recipe: str | None, source: str | None) -> WeightlessError | None:
    from exporter.contract.spec import ExportRequest

    if recipe is None and source is None:
        return None
    rule = access.rule
    asked_recipe = recipe or (rule.recipes[0].replace("*", "any") if rule is not None else "any")
    asked_source = source or (rule.sources[0].replace("*", "any") if rule is not None and rule.sources else "s3://any")
    request = ExportRequest.model_validate(
        {"recipe": asked_recipe, "source": asked_source, "target": {"backend": "cuda"}}
    )
    try:
        access.authorise(request)
    except WeightlessError as error:
        return error
    return None
