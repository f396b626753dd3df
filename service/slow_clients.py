"""Closes connections on which a request does not arrive in time: uvicorn itself would keep them for ever.

A thousand clients that send a byte now and then would else use up the service's file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST_SECONDS = 60.0
"""How long a request, headers and body together, may take to arrive; a body is at most 1 MiB."""


class PromptRequests(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol with a deadline for each request. Idle connections have uvicorn's own."""

    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first request may come now."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request; the deadline is that of its first byte."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self._incomplete():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self.request_seconds, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _incomplete(self) -> bool:
        """Whether headers or a body are still to come: no request is being answered, or its body is not whole."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _late(self) -> None:
        self._deadline = None
        if self._incomplete() and not self.transport.is_closing():
            self.transport.close()
