"""Event lines: numbering, bounds, cleaning, and what a reader refuses."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import events
from exporter.contract.errors import InternalError


def lines_of(write_all: list[bytes]) -> list[dict[str, object]]:
    return [json.loads(line.lstrip(b"\x1e")) for line in write_all]


def test_sequence_has_no_gaps_from_many_threads() -> None:
    out: list[bytes] = []
    log = events.EventLog(out.append)

    def work() -> None:
        for _ in range(50):
            log.emit("warning", code="c", message="m", details={})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["seq"] for line in lines_of(out)] == list(range(1, 201))


def test_nothing_follows_a_terminal_event() -> None:
    out: list[bytes] = []
    log = events.EventLog(out.append)
    log.emit("finished", manifest_uri="file:///m", manifest_digest="sha256:0", bytes_uploaded=1, bytes_reused=0)
    log.emit("warning", code="late", message="too late", details={})
    assert log.ended
    assert [line["type"] for line in lines_of(out)] == ["finished"]


@given(st.text(max_size=300_000 // 4), st.dictionaries(st.text(max_size=20), st.text(max_size=5000), max_size=30))
def test_any_text_gives_one_bounded_line_without_control_characters(message: str, details: dict[str, str]) -> None:
    out: list[bytes] = []
    events.EventLog(out.append).emit("warning", code="c", message=message, details=details)
    (line,) = out
    assert len(line) <= events.MAX_LINE
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    event = events.parse_event(line)
    assert isinstance(event, events.WarningEvent)
    assert "\x1b" not in event.message
    assert "\r" not in event.message


def test_ansi_and_workflow_tricks_are_stripped() -> None:
    assert events.clean_text("\x1b[31mred\x1b[0m\r\n\x07\u202eok\tend") == "red\nok\tend"


def test_framed_lines_start_with_the_record_separator() -> None:
    out: list[bytes] = []
    events.EventLog(out.append, framed=True).emit("stage", name="resolving", state="started")
    assert out[0].startswith(b"\x1e")
    assert isinstance(events.parse_event(out[0]), events.StageEvent)


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"null", b'{"v":1,"seq":0,"time":"t","type":"stage","name":"resolving","state":"started"}',
     b'{"v":1,"seq":1,"time":"t","type":"nope"}', b'{"v":2,"seq":1,"time":"t","type":"warning","code":"","message":""}',
     b"x" * (events.MAX_LINE + 1), b"\xff\xfe"],
)  # fmt: skip
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(InternalError):
        events.parse_event(line)


def test_progress_is_at_most_two_a_second_and_ends_with_the_last_figure() -> None:
    out: list[bytes] = []
    log = events.EventLog(out.append)
    for done in range(1001):
        log.progress("uploading", done, 1000)
    log.emit("stage", name="uploading", state="finished")
    first, *_, last, end = lines_of(out)
    assert len(out) < 20
    assert first == {
        "v": 1, "seq": 1, "time": first["time"], "type": "progress",
        "stage": "uploading", "done": 0, "total": 1000, "unit": "bytes",
    }  # fmt: skip
    assert (last["type"], last["done"], end["type"]) == ("progress", 1000, "stage")


def test_the_golden_lines_of_version_1_are_still_read() -> None:
    golden = [
        b'{"v":1,"seq":1,"time":"2026-11-30T15:00:00.000Z","type":"stage","name":"compiling","state":"started","method":"forward"}',
        b'{"v":1,"seq":2,"time":"2026-11-30T15:00:00.000Z","type":"progress","stage":"uploading","done":1,"total":2,"unit":"bytes","rate":3}',
        b'{"v":1,"seq":3,"time":"2026-11-30T15:00:00.000Z","type":"resources","hostAnonBytes":1,"hostRssBytes":2,"gpuBytes":3,"diskWrittenBytes":4}',
        b'{"v":1,"seq":4,"time":"2026-11-30T15:00:00.000Z","type":"upload","uploadId":"u","uri":"s3://b/k","partSize":16777216,"state":"opened"}',
        b'{"v":1,"seq":5,"time":"2026-11-30T15:00:00.000Z","type":"finished","manifestUri":"s3://b/m","manifestDigest":"sha256:0","bytesUploaded":1,"bytesReused":0}',
        b'{"v":1,"seq":6,"time":"2026-11-30T15:00:00.000Z","type":"failed","error":{"code":"cancelled","message":"m","hint":"h","retryable":false,"details":{}}}',
        b'{"v":1,"seq":7,"time":"2026-11-30T15:00:00.000Z","type":"state","from":"queued","to":"starting","attempt":1}',
    ]
    for line in golden:
        event = events.parse_event(line)
        assert json.dumps(events.dump_event(event), separators=(",", ":"), ensure_ascii=False).encode() == _in_order(
            line, event
        )


def _in_order(line: bytes, event: events.AnyEvent) -> bytes:
    data = json.loads(line)
    return json.dumps({key: data[key] for key in events.dump_event(event)}, separators=(",", ":")).encode()
