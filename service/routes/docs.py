"""The API's calls as one page, made from the OpenAPI document: no script, nothing of a third party."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from service.problems import STATUS

router = APIRouter(include_in_schema=False)
_CSP = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    base = str(request.scope.get("root_path", "")).rstrip("/")
    headers = {"Content-Security-Policy": _CSP, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(docs_html(request.app.openapi(), base), headers=headers)


def docs_html(document: dict[str, Any], base: str) -> str:
    """The page's text; every value is escaped."""
    calls = "".join(
        _call(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    codes = "".join(
        f"<tr><td><code>{escape(kind.code)}</code></td><td>{status}</td><td>{escape(_first_line(kind.__doc__))}</td></tr>"
        for kind, status in sorted(STATUS.items(), key=lambda item: (item[1], item[0].code))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>API · Weightless</title><link rel="stylesheet" href="{escape(base)}/static/weightless.css"></head>
<body><main id="content"><h1>API of Weightless {escape(document["info"]["version"])}</h1>
<p>The same for machines: <a href="{escape(base)}/openapi.json">openapi.json</a>. Bodies are JSON; errors are
<code>application/problem+json</code> with a <code>code</code>, a sentence and a <code>hint</code>.</p>
<h2>Calls</h2>{calls}
<h2>Error codes</h2>
<table><thead><tr><th>code</th><th>status</th><th>meaning</th></tr></thead><tbody>{codes}</tbody></table>
</main></body></html>
"""


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = "".join(_parameter(item) for item in operation.get("parameters", []))
    table = f"<table><tbody>{rows}</tbody></table>" if rows else ""
    answers = ", ".join(code for code in sorted(operation.get("responses", {})) if code.startswith("2"))
    summary = escape(str(operation.get("description") or operation.get("summary") or ""))
    return (
        f"<section><h3><code>{escape(method.upper())} {escape(path)}</code></h3><p>{summary}</p>{table}"
        f"<p>Answers {escape(answers)}.</p></section>"
    )


def _parameter(item: dict[str, Any]) -> str:
    text = item.get("description") or item.get("schema", {}).get("description") or ""
    return f"<tr><td><code>{escape(item['name'])}</code></td><td>{escape(item['in'])}</td><td>{escape(text)}</td></tr>"


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0] if text and text.strip() else ""
