"""`weightless token`: bearer tokens, made and revoked beside the database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from exporter.contract.base import parse_duration
from exporter.contract.errors import InvalidRequest
from service.commands.output import Json, Output

if TYPE_CHECKING:
    from service.tokens import TokenRow, TokenTable

app = typer.Typer(no_args_is_help=True, help="Bearer tokens, kept in the service's database (WEIGHTLESS_DATABASE_URL).")


@app.callback()
def token() -> None:
    """Bearer tokens, kept in the service's database (WEIGHTLESS_DATABASE_URL)."""


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use it.")],
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="read, read-all, submit, cancel, delete, admin. Repeat it.")
    ] = None,
    expires: Annotated[str | None, typer.Option("--expires", metavar="D", help="Its life, such as 90d.")] = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it once; only its digest is kept.

    \b
    Examples:
      weightless token create ci --scope read --scope submit --scope cancel --expires 90d
    """
    output = Output(as_json)
    try:
        seconds = None if expires is None else parse_duration(expires)
    except ValueError as error:
        raise InvalidRequest(f"--expires {expires}: {error}") from error
    row, token = _table().create(name, scope or ["read", "submit", "cancel"], expires_in=seconds)
    output.line(token)
    output.say(f"token {row.id} for {row.name}: {', '.join(row.scopes)}; it is not shown again")
    output.result({**_view(row), "token": token})


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `token list` shows it.")],
    as_json: Json = False,
) -> None:
    """Make a token useless from now on.

    \b
    Examples:
      weightless token revoke 0f3a…
    """
    output = Output(as_json)
    _table().revoke(token_id)
    output.line(f"{token_id} revoked")
    output.result({"id": token_id, "revoked": True})


@app.command("list")
def list_tokens(as_json: Json = False) -> None:
    """List tokens, newest first; never the tokens themselves."""
    output = Output(as_json)
    rows = _table().all()
    cells = [
        [row.id, row.name, " ".join(row.scopes), _time(row.created_at), _time(row.expires_at), _time(row.revoked_at)]
        for row in rows
    ]
    output.table(["id", "name", "scopes", "created", "expires", "revoked"], cells)
    output.result({"items": [_view(row) for row in rows]})


def _table() -> TokenTable:
    # Imported here: the client's commands start without SQLAlchemy.
    from service.database import Database
    from service.settings import load_settings
    from service.tokens import TokenTable

    settings = load_settings()
    database = Database(settings.sqlalchemy_url)
    database.migrate()
    return TokenTable(database)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _view(row: TokenRow) -> dict[str, object]:
    return {
        "id": row.id,
        "name": row.name,
        "scopes": list(row.scopes),
        "createdAt": _time(row.created_at),
        "expiresAt": _time(row.expires_at) or None,
        "revokedAt": _time(row.revoked_at) or None,
    }
