"""Other people's text in the job summary: a Markdown parser must see nothing but text."""

from __future__ import annotations

import pytest
from export_action import markdown
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from exporter.contract.events import clean_text

PARSER = MarkdownIt("gfm-like", {"linkify": False})
MARKUP = st.text(alphabet="`*_[]()<>|#!~:$@\\&;-+=1.) \n\t\"'ax")


@given(st.one_of(st.text(), MARKUP))
@example("- item")
@example("1. item")
@example("12. item")
@example("===")
@example("<!-- -->")
@example("&lt;script&gt;")
@example("www.example.org")
def test_action_text_is_only_text(value: str) -> None:
    tokens = PARSER.parse(markdown.text(value))
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or []}
    assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text"}
    shown = "".join(child.content for token in tokens for child in token.children or [])
    assert shown == " ".join(clean_text(value).split())


@given(st.lists(st.lists(st.one_of(st.text(max_size=30), MARKUP), min_size=3, max_size=3), max_size=5))
def test_action_table_keeps_its_shape(rows: list[list[str]]) -> None:
    lines = markdown.table(["a", "b", "c"], [[markdown.code(cell) for cell in row] for row in rows], [2])
    tokens = PARSER.parse("\n".join(lines))
    assert sum(token.type == "tr_open" for token in tokens) == len(rows) + 1
    assert sum(token.type == "td_open" for token in tokens) == 3 * len(rows)


@pytest.mark.parametrize(
    ("url", "linked"),
    [
        ("https://export.example.org/exports/exp_1", True),
        ("http://127.0.0.1:8080/exports/exp_1", True),
        ("javascript:alert(1)", False),
        ("https://a b", False),
        ("https://a)](javascript:alert(1))", False),
        ("", False),
    ],
)
def test_action_links_only_plain_addresses(url: str, linked: bool) -> None:
    tokens = PARSER.parse(markdown.link("page", url))
    links = [child.attrs["href"] for token in tokens for child in token.children or [] if child.type == "link_open"]
    assert links == ([url] if linked else [])
