"""Prometheus metrics, computed from the database when they are asked for: every replica gives the same answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.database import Clock
from service.executor_table import ExecutorTable
from service.job_store import JobStore

CACHE_SECONDS = 5.0
"""Scrapes within this time get the same figures: counting reads a whole index."""


class Metrics(Collector):
    """Collects from the tables. Names start with `weightless_`; sizes are bytes, times seconds."""

    def __init__(self, jobs: JobStore, executors: ExecutorTable, *, clock: Clock = time.time) -> None:
        self._jobs = jobs
        self._executors = executors
        self._clock = clock
        self._rendered: tuple[float, bytes] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The text that a scrape gets."""
        now = self._clock()
        if self._rendered is None or now - self._rendered[0] >= CACHE_SECONDS:
            self._rendered = (now, generate_latest(self._registry))
        return self._rendered[1]

    def describe(self) -> Iterator[Metric]:
        """Nothing: the figures are not read before they are asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every figure."""
        totals = self._jobs.totals()
        exports = GaugeMetricFamily("weightless_exports", "Exports by state and error code.", labels=["state", "code"])
        for (state, code), count in sorted(totals.by_state.items()):
            exports.add_metric([state, code], count)
        yield exports
        depth = totals.by_state.get(("queued", ""), 0)
        yield GaugeMetricFamily("weightless_queue_depth", "Exports that wait for a slot.", value=depth)
        age = 0.0 if totals.oldest_queued is None else max(0.0, self._clock() - totals.oldest_queued)
        yield GaugeMetricFamily("weightless_queue_age_seconds", "Age of the oldest waiting export.", value=age)
        for name, text in (
            ("bytes_sent", "Bytes of weights and programs sent to the store."),
            ("bytes_reused", "Bytes of weights that the store had already."),
        ):
            yield CounterMetricFamily(f"weightless_{name}", text, value=totals.counted.get((name, ""), 0))
        stages = CounterMetricFamily("weightless_stage_seconds", "Time spent in each stage.", labels=["stage"])
        for (name, stage), seconds in sorted(totals.counted.items()):
            if name == "stage_seconds":
                stages.add_metric([stage], seconds)
        yield stages
        peaks = GaugeMetricFamily(
            "weightless_peak_bytes", "Highest peak of the last hundred finished exports.", labels=["resource"]
        )
        for resource, value in sorted(totals.peaks.items()):
            peaks.add_metric([resource], value)
        yield peaks
        yield from self._slots()

    def _slots(self) -> Iterator[Metric]:
        slots = GaugeMetricFamily("weightless_slots", "Slots of an executor.", labels=["host", "kind", "use"])
        up = GaugeMetricFamily("weightless_executor_up", "Whether an executor has a fresh heartbeat.", labels=["host"])
        for row in self._executors.all():
            slots.add_metric([row.host, row.kind, "busy"], row.busy)
            slots.add_metric([row.host, row.kind, "free"], max(0, row.slots - row.busy) if row.alive else 0)
            up.add_metric([row.host], int(row.alive))
        yield slots
        yield up
