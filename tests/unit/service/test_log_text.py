"""A log's bytes to text, however they are cut."""

from __future__ import annotations

import random

from service.routes.streams import LOG_CHUNK, LogText


def test_no_cut_shows() -> None:
    log = "".join(f"{number} ünïcödé \u65e5\u672c \x1b[31mred\x1b[0m\n" for number in range(500)) + "the end, é"
    data, cuts = log.encode(), random.Random(7)
    for most in (1, 7, 4000):
        text, shown, offset = LogText(), "", 0
        while offset < len(data):
            size = cuts.randint(1, most)
            shown += text.feed(data[offset : offset + size])
            offset += size
        shown += text.feed(b"", final=True)
        assert shown == log.replace("\x1b[31m", "").replace("\x1b[0m", "")


def test_a_line_without_an_end_is_not_kept() -> None:
    text, shown = LogText(), 0
    for _ in range(100):
        shown += len(text.feed(b"x" * LOG_CHUNK))
    assert shown == 100 * LOG_CHUNK


def test_bytes_that_are_no_text() -> None:
    text = LogText()
    assert text.feed(b"a\xff\xe6\x97") + text.feed(b"", final=True) == "a\ufffd\ufffd"
