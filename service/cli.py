"""The `weightless` command: which commands there are, and with which status each ends (contract.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from exporter.contract.errors import WeightlessError
from service.commands import artifacts, exports, operate, policies, tokens
from service.commands.interrupts import Interrupted, raise_interrupts
from service.commands.output import USAGE, Output, exit_status

app = typer.Typer(
    name="weightless",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def weightless(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=lambda value: _version(value), is_eager=True),
    ] = False,
) -> None:
    """Export PyTorch models to ExecuTorch without holding their weights.

    Exit status: 0 done, 1 the export or the check failed, 2 wrong usage, 3 service or store unreachable,
    4 not allowed, 5 cancelled, 6 --timeout passed (the export goes on).
    """


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("weightless"))
        except PackageNotFoundError:
            typer.echo("unknown: run from a source tree that is not installed")
        raise typer.Exit


app.command(cls=operate.ServeCommand)(operate.serve)
app.command()(exports.submit)
app.command()(exports.status)
app.command("list")(exports.list_exports)
app.command()(exports.logs)
app.command()(exports.cancel)
app.command()(artifacts.pull)
app.command()(artifacts.verify)
app.command()(artifacts.inspect)
app.command()(operate.gc)
app.command()(operate.doctor)
app.add_typer(tokens.app, name="token")
app.add_typer(policies.app, name="policy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    raise_interrupts()
    try:
        app(args=given, prog_name="weightless")
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else 0 if done.code is None else 1
        if status == USAGE and "--json" in given:
            Output(True).result({"error": {"code": "invalid-request", "message": "wrong usage; see standard error"}})
        return status
    except WeightlessError as error:
        Output("--json" in given).error(error)
        return exit_status(error)
    except Interrupted as interrupted:
        return interrupted.status
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
