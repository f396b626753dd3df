"""Markdown that holds other people's text: escaped as character references, which are never taken for markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from exporter.contract.events import clean_text

_RISKY = re.compile(r"[&<>`\\*_{}\[\]()#!|~@:$^]|^[-+=]|(?<=www)\.|(?<=^\d)\.|(?<=^\d\d)\.", re.IGNORECASE)


def text(value: object, limit: int = 500) -> str:
    """One line of plain text: nothing in it is markup, a link, a mention or a table's bar."""
    line = " ".join(clean_text(str(value)).split())
    if len(line) > limit:
        line = line[:limit] + "…"
    return _RISKY.sub(lambda found: f"&#{ord(found.group())};", line)


def code(value: object, limit: int = 500) -> str:
    """`text` in a fixed-width font."""
    return f"<code>{text(value, limit)}</code>"


def link(label: str, url: str) -> str:
    """A link, if `url` is plain http or https; else the label. `label` is Markdown already."""
    if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_~/?&=%#,;+@!$'*-]+", url):
        return label
    safe = re.sub(r"[\[\]'*!$]", lambda found: f"%{ord(found.group()):02X}", url)
    return f"[{label}]({safe})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """Lines of a table. Cells are Markdown already, without line ends; columns in `numbers` are aligned right."""
    right = set(numbers)
    lines = [_row(head), _row(["---:" if index in right else "---" for index in range(len(head))])]
    lines += [_row(row) for row in rows]
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
