"""The Ray Jobs API over HTTP, as far as exports need it. Ray itself is not imported: its address is enough.

Every call has a time limit and a size limit; whatever fails is `ExecutorLost`, which a retry can help.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from exporter.contract.errors import ExecutorLost, InvalidRequest

TIMEOUT = 15.0
"""Seconds that one request may take; Ray answers a submission before the job has a place."""
SILENCE = 30.0
"""Seconds without a line after which a log is read anew: a broken connection looks like a silent job."""
MAX_ANSWER = 16 * 2**20
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_INSECURE_HINT = "Start Ray with RAY_AUTH_MODE=token, or set WEIGHTLESS_RAY_INSECURE where nobody else reaches it."


class Unreachable(ExecutorLost):
    """Ray did not answer: what was asked may have been done or not."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job's state. `exit_code` is the entry point's own, None where Ray did not see it end."""

    status: str
    exit_code: int | None = None
    error_type: str | None = None
    message: str = ""

    @property
    def terminal(self) -> bool:
        """Whether Ray says that it is over; for FAILED that may only mean that Ray lost sight of it."""
        return self.status in TERMINAL


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive and its total resources."""

    id: str
    name: str
    resources: Mapping[str, float]

    @property
    def gpus(self) -> int:
        """GPUs that Ray counts on the node."""
        return int(self.resources.get("GPU", 0))

    @property
    def features(self) -> frozenset[str]:
        """Names of custom resources, such as `cuda-13.0`, and of accelerators."""
        plain = ("CPU", "GPU", "memory", "object_store_memory")
        return frozenset(name for name in self.resources if name not in plain and not name.startswith("node:"))


def ray_token() -> str | None:
    """Ray's token from where Ray's own programs look for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class RayJobs:
    """One Ray cluster. Use it on one event loop, between `open` and `close`."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        if not address.startswith(("http://", "https://")):
            raise InvalidRequest(
                "WEIGHTLESS_RAY_ADDRESS is the URL of Ray's dashboard", hint="For example http://ray-head:8265."
            )
        self._address = address.rstrip("/")
        self._insecure = insecure
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def check_access(self) -> None:
        """`InvalidRequest` where Ray takes requests without a token: anybody who reaches it can run code there."""
        if self._insecure:
            return
        status, _ = await self._ask("GET", "/api/version", token=None)
        if status not in (401, 403):
            raise InvalidRequest("the Ray address takes requests without a token", hint=_INSECURE_HINT)
        if ray_token() is None:
            raise InvalidRequest(
                "there is no token for the Ray address", hint="Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
            )

    async def submit(self, job: Mapping[str, Any]) -> None:
        """Submit a job. A job that is there under the same id already is ours: an answer was lost."""
        status, body = await self._ask("POST", "/api/jobs/", job)
        if status != 200 and await self.find(job["submission_id"]) is None:
            raise ExecutorLost(f"Ray did not take the job (HTTP {status}): {_last_line(body)}")

    async def find(self, job_id: str) -> Job | None:
        """A job's state, None where Ray does not know it."""
        status, body = await self._ask("GET", f"/api/jobs/{job_id}")
        if status == 404:
            return None
        found = _object(status, body)
        code = found.get("driver_exit_code")
        return Job(
            status=str(found.get("status")),
            exit_code=code if isinstance(code, int) else None,
            error_type=found.get("error_type"),
            message=str(found.get("message") or "")[:500],
        )

    async def unfinished(self) -> dict[str, dict[str, str]]:
        """The metadata of each submitted job that is not over, by its id."""
        status, body = await self._ask("GET", "/api/jobs/")
        try:
            rows = json.loads(body)
            return {
                str(row["submission_id"]): dict(row.get("metadata") or {})
                for row in rows
                if row.get("submission_id") and row["status"] not in TERMINAL
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ExecutorLost(f"Ray's list of jobs has an unknown form (HTTP {status})") from error

    async def stop(self, job_id: str) -> None:
        """SIGTERM to the job's processes, and SIGKILL after the wait that its environment names."""
        await self._ask("POST", f"/api/jobs/{job_id}/stop")

    async def delete(self, job_id: str) -> None:
        """Forget a job that is over."""
        await self._ask("DELETE", f"/api/jobs/{job_id}")

    async def logs(self, job_id: str) -> str:
        """The whole log of a short job."""
        return str(_object(*await self._ask("GET", f"/api/jobs/{job_id}/logs")).get("logs", ""))

    async def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        found = _object(*await self._ask("GET", "/api/v0/nodes?detail=1&limit=1000"))
        try:
            rows = found["data"]["result"]["result"]
            return [
                Node(str(row["node_id"]), str(row["node_name"]), dict(row["resources_total"] or {}))
                for row in rows
                if row["state"] == "ALIVE"
            ]
        except (KeyError, TypeError) as error:
            raise ExecutorLost("Ray's list of nodes has an unknown form") from error

    async def tail(self, job_id: str) -> AsyncGenerator[str, None]:
        """The log from its start, as it grows, until the job is over; pieces may end within a line.

        `ExecutorLost` where the connection breaks or nothing comes for `SILENCE` seconds.
        """
        assert self._session is not None
        url = f"{self._address}/api/jobs/{job_id}/logs/tail"
        try:
            async with self._session.ws_connect(url, headers=_headers(ray_token())) as socket:
                while True:
                    message = await socket.receive(timeout=SILENCE)
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data
                    elif message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
                        return
                    else:
                        raise ExecutorLost("the log's connection broke")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ExecutorLost(f"the log cannot be read: {type(error).__name__}") from error

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, token: str | None = ""
    ) -> tuple[int, bytes]:
        """Status and body; an empty `token` stands for the configured one. Redirects are not followed."""
        assert self._session is not None
        headers = _headers(ray_token() if token == "" else token)
        try:
            async with self._session.request(
                method, self._address + path, json=body, headers=headers, allow_redirects=False
            ) as answer:
                data = bytearray()
                async for chunk in answer.content.iter_chunked(2**16):
                    data += chunk
                    if len(data) > MAX_ANSWER:
                        raise ExecutorLost("an answer of Ray is larger than 16 MiB")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(
                f"Ray cannot be reached: {type(error).__name__}", hint="Check WEIGHTLESS_RAY_ADDRESS and the cluster."
            ) from error
        if token == "" and answer.status in (401, 403):
            raise ExecutorLost("Ray refused our token", hint="Check RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH.")
        return answer.status, bytes(data)


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _object(status: int, body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status != 200 or not isinstance(found, dict):
        raise ExecutorLost(f"Ray answered HTTP {status}: {_last_line(body)}")
    return found


def _last_line(body: bytes) -> str:
    """The last line of Ray's answer to a failure, which is a traceback."""
    return (body.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:200]
