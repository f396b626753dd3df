"""What an export says while it runs and what it left behind: events, logs, manifest, download links."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import unquote

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from exporter.contract.errors import InvalidRequest, NotFinished, NotFound, StoreRejected, WeightlessError
from exporter.contract.events import clean_text
from exporter.contract.manifest import MAX_MANIFEST, MEDIA_TYPE, Manifest, parse_manifest
from service import schemas
from service.event_feed import EventFeed
from service.job_store import JobStore
from service.jobs import TERMINAL, Export, State
from service.ports import ArtifactStore, LogSource
from service.routes.access import Allowed, ExportId, find
from service.rows import rfc3339

router = APIRouter(tags=["exports"])
log = structlog.get_logger(__name__)
BATCH = 500
"""Events read at once for one stream."""
LOG_CHUNK = 64 * 1024
_TERMINAL = {state.value for state in TERMINAL}


def watched(request: Request, export_id: ExportId, allowed: Allowed) -> Export:
    """The export of a stream, found before the stream starts, so that an error is still an error answer."""
    return find(request, allowed, export_id)


def resumed(
    last_event_id: Annotated[str | None, Header(description="Resume behind this event.")] = None,
) -> int:
    """The number behind which a stream starts."""
    if last_event_id is None or last_event_id == "":
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", last_event_id, re.ASCII):
        raise InvalidRequest("Last-Event-ID is the number of an event", field="Last-Event-ID")
    return int(last_event_id)


@router.get("/exports/{export_id}/events", response_class=EventSourceResponse)
async def events(
    request: Request, export: Annotated[Export, Depends(watched)], after: Annotated[int, Depends(resumed)]
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events from the first, or behind `Last-Event-ID`; the stream ends after the terminal state."""
    jobs: JobStore = request.app.state.jobs
    feed: EventFeed = request.app.state.feed
    with feed.watch(export.id) as news:
        while not feed.stopping:
            news.clear()
            rows = await run_in_threadpool(jobs.events, export.id, after=after, limit=BATCH)
            for row in rows:
                after = row.id
                yield ServerSentEvent(raw_data=row.data, event=row.type, id=str(row.id))
                if row.type == "state" and json.loads(row.data)["to"] in _TERMINAL:
                    return
            if len(rows) == BATCH:
                continue
            if not rows and await _over(jobs, export.id):
                return
            await news.wait()  # set by news, and by the stop


async def _over(jobs: JobStore, export_id: str) -> bool:
    try:
        return (await run_in_threadpool(jobs.get, export_id)).state.terminal
    except NotFound:
        return True


@router.get("/exports/{export_id}/logs", response_class=PlainTextResponse)
async def logs(
    request: Request,
    export: Annotated[Export, Depends(watched)],
    follow: bool = False,
    attempt: Annotated[int | None, Query(ge=1, le=10_000)] = None,
) -> Response:
    """The exporter's log as text, of the newest attempt unless one is named; `follow=1` goes on to the export's end."""
    source: LogSource = request.app.state.logs
    number = export.attempt if attempt is None else attempt
    if number == 0 and not follow:
        return PlainTextResponse("")
    if number > export.attempt:
        raise NotFound(f"the export has no attempt {number}")
    if number and await run_in_threadpool(source.read, export.id, number, 0, 0) is None and export.state.terminal:
        raise NotFound(
            "the log is not on this machine", hint="Logs stay on the executor's machine, and for as long as it."
        )
    lines = _follow(request, export.id, attempt) if follow else _text(source, export.id, number)
    return StreamingResponse(
        lines, media_type="text/plain; charset=utf-8", headers={"X-Content-Type-Options": "nosniff"}
    )


class LogText:
    """A log's bytes, as they come, to clean text: whole lines, or 64 KiB of one without an end. Holds no more."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """What can be shown now; with `final` all that is left."""
        text = self._pending + self._decoder.decode(data, final)
        end = len(text) if final or len(text) >= LOG_CHUNK else text.rfind("\n") + 1
        self._pending = text[end:]
        return clean_text(text[:end])


async def _text(source: LogSource, export_id: str, attempt: int) -> AsyncIterator[str]:
    offset, text = 0, LogText()
    while chunk := await run_in_threadpool(source.read, export_id, attempt, offset, LOG_CHUNK):
        offset += len(chunk)
        yield text.feed(chunk)
    yield text.feed(b"", final=True)


async def _follow(request: Request, export_id: str, named: int | None) -> AsyncIterator[str]:
    """The log of attempt `named`; where none is, of the newest, and then of those that follow it."""
    jobs: JobStore = request.app.state.jobs
    source: LogSource = request.app.state.logs
    feed: EventFeed = request.app.state.feed
    attempt, offset, text = named or 0, 0, LogText()
    with feed.watch(export_id) as news:
        while not feed.stopping:
            news.clear()
            try:
                export = await run_in_threadpool(jobs.get, export_id)
            except NotFound:
                return
            attempt = attempt or export.attempt
            chunk = await run_in_threadpool(source.read, export_id, attempt, offset, LOG_CHUNK) if attempt else None
            if chunk:
                offset += len(chunk)
                yield text.feed(chunk)
                continue
            if named is None and export.attempt > attempt:
                yield text.feed(b"", final=True)
                attempt, offset, text = export.attempt, 0, LogText()
                continue
            if export.state.terminal:
                yield text.feed(b"", final=True)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 0.5)


@router.get("/exports/{export_id}/manifest", response_class=Response)
def manifest(
    request: Request,
    export_id: ExportId,
    allowed: Allowed,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The manifest as stored, byte for byte; `ETag` is its digest."""
    export = find(request, allowed, export_id)
    data = _stored_manifest(request.app.state.store, export)
    headers = {"ETag": f'"{export.manifest_digest}"', "Cache-Control": "private, no-cache", "Vary": "Accept"}
    if if_none_match is not None and _matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=MEDIA_TYPE)


@router.post("/exports/{export_id}/downloads", response_model=schemas.Downloads)
def downloads(
    request: Request, export_id: ExportId, allowed: Allowed, body: schemas.DownloadBody | None = None
) -> Response:
    """Links to the export's files that need no login; their life is at most WEIGHTLESS_PRESIGN_MAX."""
    export = find(request, allowed, export_id)
    wanted = (body or schemas.DownloadRequest()).expires_in
    if wanted == 0:
        raise InvalidRequest("a link lives for at least a second", field="expiresIn")
    store: ArtifactStore = request.app.state.store
    longest = [request.app.state.settings.presign_max]
    if allowed.rule is not None and allowed.rule.presign is not None:
        longest.append(allowed.rule.presign)
    seconds = min(wanted, *longest)
    keys = _file_keys(store, export, parse_manifest(_stored_manifest(store, export)))
    expires = time.time() + seconds
    urls = {name: _link(store, key, seconds) for name, key in keys.items()}
    log.info("download links made", export=export.id, owner=allowed.caller.owner, files=list(urls), seconds=seconds)
    return JSONResponse({"expiresAt": rfc3339(expires), "urls": urls}, headers={"Cache-Control": "no-store"})


def _matches(if_none_match: str, etag: str) -> bool:
    """Whether If-None-Match names the tag; weakly compared, since proxies that compress make tags weak (RFC 9110)."""
    parts = [part.strip().removeprefix("W/") for part in if_none_match.split(",")]
    return etag in parts or parts == ["*"]


def _stored_manifest(store: ArtifactStore, export: Export) -> bytes:
    if export.state is not State.SUCCEEDED:
        raise NotFinished(f"the export is {export.state} and has no manifest", hint=_manifest_hint(export))
    stored = store.head(export.key)
    if stored is None:
        raise NotFound("the manifest is not in the store any more", hint="It was removed beside the service.")
    if stored.size > MAX_MANIFEST:
        raise StoreRejected("the stored manifest is larger than a manifest can be")
    return store.read(export.key, 0, stored.size)


def _manifest_hint(export: Export) -> str | None:
    return None if not export.state.terminal else "The export did not succeed; its error says why."


def _file_keys(store: ArtifactStore, export: Export, found: Manifest) -> dict[str, str]:
    """Names of the manifest's files and their keys in the store; relative URLs are relative to the manifest."""
    folder = export.key.removesuffix("manifest.json")
    keys = {"manifest.json": export.key}
    entries: list[Any] = [found.program, *found.data, *found.files]
    for entry in entries:
        for url in entry.urls:
            key = store.key_of(url) if "://" in url else _below(folder, url)
            if key is not None:
                keys[entry.name] = key
                break
    return keys


def _below(folder: str, relative: str) -> str | None:
    """The key of a URL relative to `folder`; None where it would leave the store."""
    parts: list[str] = folder.rstrip("/").split("/")
    for part in unquote(relative).split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _link(store: ArtifactStore, key: str, seconds: int) -> str:
    try:
        return store.presign(key, seconds)
    except StoreRejected:
        uri = store.uri(key)
        if uri.startswith("file://"):
            return uri  # a store in a directory has no links; on its machine the file's own address does
        raise
    except WeightlessError:
        raise
