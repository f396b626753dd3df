"""A server that closes connections whose request does not arrive, and only those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from service.__main__ import listen
from service.slow_clients import PromptRequests

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"


class Quick(PromptRequests):
    """With a deadline that a test can wait for."""

    request_seconds = 0.3


async def answer(request: Request) -> PlainTextResponse:
    body = await request.body()
    await asyncio.sleep(0.6)  # longer than the deadline: an answer may take its time
    return PlainTextResponse(body)


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of a running server."""
    app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, http=Quick, log_config=None, lifespan="off", timeout_keep_alive=75))
    sockets = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield int(sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task


async def sent(port: int, *pieces: bytes) -> bytes:
    """What the server says to a client that sends `pieces` 0.2 s apart and then nothing, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.2)
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [(), (HEAD,), (HEAD + b"\r\n",), (HEAD + b"\r\na", b"b", b"c"), tuple(bytes([byte]) for byte in HEAD[:12])],
    ids=["nothing", "half a head", "no body", "a slow body", "a byte now and then"],
)
def test_a_request_that_does_not_arrive_is_given_up(pieces: tuple[bytes, ...]) -> None:
    async def run() -> None:
        async with serving() as port:
            assert await sent(port, *pieces) == b""

    asyncio.run(run())


def test_a_slow_answer_is_not_cut_and_the_next_request_has_its_own_deadline() -> None:
    async def run() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(HEAD + b"\r\nbody")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                assert head.startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(4) == b"body"
            writer.write(HEAD)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    asyncio.run(run())
