"""Builds the concrete parts and serves: `python -m service`, and `weightless serve`."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.util import find_spec

import structlog
import uvicorn

from exporter.contract.errors import InvalidRequest, WeightlessError
from exporter.store.open import open_store
from service.app import Parts, create_app
from service.auth import Authenticator
from service.commands.orphans import Orphans
from service.database import Database
from service.delivery_table import DeliveryTable
from service.deployment import deployment_id
from service.executor_table import ExecutorTable
from service.executors.base import Executor
from service.executors.local import COMMAND, LocalExecutor, LocalLogs
from service.issuer_keys import IssuerKeys
from service.job_queue import JobQueue
from service.job_store import JobStore
from service.logging_setup import configure_logging
from service.metrics import Metrics
from service.oidc import OidcVerifier
from service.policy import load_policy
from service.reaper import Reaper
from service.running import Timing
from service.scheduler import Scheduler
from service.settings import GITHUB_ISSUER, Settings, load_settings
from service.slow_clients import PromptRequests
from service.tokens import TokenTable
from service.webhooks import WebhookSender

log = structlog.get_logger("service")

STREAM_SECONDS = 2
"""How long a stop waits for open answers; event streams end by themselves before that."""

EVICT_SECONDS = 12
"""How long exporters have to end where nothing can go on without this process."""


class Server(uvicorn.Server):
    """uvicorn, which also ends event streams as soon as it is told to stop: otherwise they would keep it."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT, and then return: uvicorn would raise the signal again and skip our own end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """End streams, then stop as uvicorn does."""
        self._stopping()
        await super().shutdown(sockets)  # type: ignore[arg-type]


def build(settings: Settings, *, command: Sequence[str] = COMMAND) -> tuple[Parts, Scheduler, Database]:
    """The parts of a service, connected; the database is brought up to date first."""
    _make_data_dir(settings)
    database = Database(settings.sqlalchemy_url)
    executor = _executor(settings, command)
    database.migrate()
    store = open_store(settings.store_spec())
    table, jobs, deployment = ExecutorTable(database), JobStore(database), deployment_id(database)
    reaper = Reaper(Orphans(jobs, settings, deployment).abort)
    scheduler = Scheduler(
        queue=JobQueue(database),
        table=table,
        executor=executor,
        store=store,
        store_spec=settings.store_spec,
        sources=settings.source_policy,
        deployment=deployment,
        timing=Timing(lease=float(settings.lease_seconds)),
    )
    parts = Parts(
        settings=settings,
        jobs=jobs,
        executors=table,
        store=store,
        authenticator=_authenticator(settings, database),
        policy=load_policy(settings.policy),
        logs=LocalLogs(settings.data_dir),
        metrics=Metrics(jobs, table),
        background=_background(scheduler, executor, settings, reaper, _sender(settings, database)),
    )
    return parts, scheduler, database


def _make_data_dir(settings: Settings) -> None:
    """The data directory, writable; `InvalidRequest` where it cannot be."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=settings.data_dir):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"the data directory cannot be used: {error.strerror}",
            hint=f"Set WEIGHTLESS_DATA_DIR to a directory that can be written, not {settings.data_dir}.",
        ) from error


def _executor(settings: Settings, command: Sequence[str]) -> Executor:
    if settings.executor == "ray":
        return _ray_executor(settings)
    return LocalExecutor(settings.data_dir, slots=settings.slots, command=command)


def _ray_executor(settings: Settings) -> Executor:
    if find_spec("aiohttp") is None:
        raise InvalidRequest("executor ray needs aiohttp", hint="Install it: pip install 'weightless[ray]'.")
    from service.executors.ray import RayExecutor

    if not settings.store_uri.startswith("s3://"):
        log.warning("every Ray node must reach the store at the same path", store=settings.store_uri)
    address = settings.ray_address or ""
    return RayExecutor(settings.data_dir, address, slots=settings.slots, insecure=settings.ray_insecure)


def _authenticator(settings: Settings, database: Database) -> Authenticator:
    return Authenticator(
        anonymous="none" in settings.auth,
        tokens=TokenTable(database) if "token" in settings.auth else None,
        oidc=_oidc(settings) if "github-oidc" in settings.auth else None,
    )


def _oidc(settings: Settings) -> OidcVerifier:
    issuer = settings.oidc_issuer or GITHUB_ISSUER
    return OidcVerifier(issuer, settings.oidc_audience or "", IssuerKeys(issuer))


def _sender(settings: Settings, database: Database) -> WebhookSender | None:
    if settings.webhook_key is None:
        return None
    key = settings.webhook_key.get_secret_value().encode()
    return WebhookSender(DeliveryTable(database), key, settings.webhook_hosts)


def _background(
    scheduler: Scheduler, executor: Executor, settings: Settings, reaper: Reaper, sender: WebhookSender | None
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """The scheduler's thread, for as long as the app lives; at the end it drains where attempts could not go on."""

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
        thread.start()
        threading.Thread(target=reaper.run, name="reaper", daemon=True).start()
        if sender is not None:
            threading.Thread(target=sender.run, name="webhooks", daemon=True).start()
        try:
            yield
        finally:
            reaper.stop()
            if sender is not None:
                sender.stop()
            scheduler.drain()
            if not executor.reattachable:
                await _drained(scheduler, settings.drain_seconds)
            scheduler.stop()
            await asyncio.to_thread(thread.join, 2.0)

    return running


async def _drained(scheduler: Scheduler, seconds: int) -> None:
    """Wait for running exports, and end those that take longer so that they give their uploads back."""
    log.info("waiting for running exports", busy=scheduler.busy, seconds=seconds)
    for moment in range(int((seconds + EVICT_SECONDS) * 5)):
        if scheduler.busy == 0:
            return
        if moment == seconds * 5:
            scheduler.evict()
        await asyncio.sleep(0.2)


def serve(settings: Settings, *, command: Sequence[str] = COMMAND) -> None:
    """Serve until told to stop (SIGTERM, SIGINT)."""
    configure_logging(settings.log_level)
    sockets = listen(settings.host, settings.port)
    try:
        parts, _, database = build(settings, command=command)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    app = create_app(parts)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=PromptRequests,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STREAM_SECONDS,
        timeout_keep_alive=75,  # longer than proxies keep theirs, so that it is they who close
        proxy_headers=False,
    )
    _settle_memory()
    log.info("serving", url=settings.base_url, store=settings.store_uri, auth=",".join(settings.auth))
    try:
        Server(config, app.state.feed.stop).run(sockets)
    finally:
        database.dispose()


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of `host`; `InvalidRequest` where one cannot be had.

    Bound before anything else starts: a second service on a taken port must not claim an export and then end.
    """
    found: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((item[0], item[4]) for item in addresses):
            bound = socket.socket(family, socket.SOCK_STREAM)
            found.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
    except (OSError, UnicodeError) as error:
        for bound in found:
            bound.close()
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise InvalidRequest(
            f"cannot listen on {host} port {port}: {reason}",
            hint="Choose another address: WEIGHTLESS_HOST, WEIGHTLESS_PORT.",
        ) from error
    return found


def _settle_memory() -> None:
    """Take what was imported out of the garbage collector's sight, and let it look less often.

    A full collection over half a million imported objects stops every request for 0.1 to 0.4 s; measured with 500 open
    streams, that was the 99th percentile of every call.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main() -> int:
    """Exit status 0 after a stop, 2 for settings that are wrong."""
    try:
        serve(load_settings())
    except WeightlessError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
