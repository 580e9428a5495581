"""Metrics for Prometheus from the signals (extra `prometheus`). Serving them is prometheus-client's own part.

- `runonce_calls_total` by `outcome`: the requests of calls. A run "finished", ended as "unknown" or "too_large" (to
  keep), or was "released"; a repeat was "replayed"; a request was "refused"
- `runonce_refusals_total` by `code`: see CONTRACT section 6; as `call_refused` tells of them
- `runonce_cancels_total` by `state`: "not_received", "running" or "done"
- `runonce_lost_owners_total`: runs whose owner died
- `runonce_run_seconds` by `status`: how long runs took; 500 is also the status of an outcome that is unknown
- `runonce_wait_seconds`: how long repeats that were answered had waited
- `runonce_result_bytes_total` by `part`: of the results that a budget cut, the bytes "kept" and "left_out"
- `runonce_saved_bytes_total`: of the bodies that were saved
- `runonce_records`, `runonce_records_bytes`: what a store keeps; see `Records`
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from blinker import ANY
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .. import signals
from ..errors import StoreError
from ..stores import MemoryStore, Store

_BUCKETS = (*Histogram.DEFAULT_BUCKETS[:-1], 30.0, 60.0, 300.0, 1800.0)
"""Seconds. A tool call may take far longer than the web requests that the default is made for."""


def instrument(sender: Any = ANY, *, registry: CollectorRegistry = REGISTRY) -> None:
    """Count in `registry` what becomes of calls.

    `sender` is the Flask app, or the app that the middleware wraps; without it, all apps of the process are counted
    together. Raises ValueError where `registry` has these metrics already.
    """
    calls = Counter("runonce_calls", "Requests of calls, by what became of them.", ["outcome"], registry=registry)
    refusals = Counter("runonce_refusals", "Refused requests.", ["code"], registry=registry)
    cancels = Counter("runonce_cancels", "Cancels, by what the first one found.", ["state"], registry=registry)
    lost = Counter("runonce_lost_owners", "Runs whose owner died.", registry=registry)
    runs = Histogram("runonce_run_seconds", "How long runs took.", ["status"], buckets=_BUCKETS, registry=registry)
    waits = Histogram("runonce_wait_seconds", "How long repeats waited.", buckets=_BUCKETS, registry=registry)
    saved = Counter("runonce_saved_bytes", "Bytes of the bodies that were saved.", registry=registry)
    results = Counter("runonce_result_bytes", "Bytes of results that were cut.", ["part"], registry=registry)

    def finished(_: Any, *, status: int, seconds: float, bytes: int, ended: str, **facts: Any) -> None:
        calls.labels("finished" if ended == "response" else ended).inc()
        saved.inc(bytes)
        runs.labels(str(status)).observe(seconds)

    def replayed(_: Any, *, seconds: float, **facts: Any) -> None:
        calls.labels("replayed").inc()
        waits.observe(seconds)

    def refused(_: Any, *, code: str, **facts: Any) -> None:
        calls.labels("refused").inc()
        refusals.labels(code).inc()

    def released(_: Any, **facts: Any) -> None:
        calls.labels("released").inc()

    def canceled(_: Any, *, state: str, **facts: Any) -> None:
        cancels.labels(state).inc()

    def was_lost(_: Any, **facts: Any) -> None:
        lost.inc()

    def cut(_: Any, *, original_bytes: int, kept_bytes: int, **facts: Any) -> None:
        results.labels("kept").inc(kept_bytes)
        results.labels("left_out").inc(original_bytes - kept_bytes)

    for signal, receiver in (
        (signals.call_finished, finished),
        (signals.call_replayed, replayed),
        (signals.call_refused, refused),
        (signals.call_released, released),
        (signals.call_canceled, canceled),
        (signals.call_lost, was_lost),
        (signals.result_cut, cut),
    ):
        signal.connect(receiver, sender, weak=False)  # nobody else holds it


class Records(Collector):
    """How many records `store` keeps, asked for at each scrape: `REGISTRY.register(Records(store))`.

    Asking costs a walk over all records in memory and in Redis, and a COUNT in SQL. A store that cannot be reached
    gives no sample, so that the other metrics are still served. Bytes are told of a memory store only.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The metric without its value: a registry asks at start, when no store may be opened yet."""
        families = [GaugeMetricFamily("runonce_records", "Records that the store keeps.")]
        if isinstance(self._store, MemoryStore):
            families.append(GaugeMetricFamily("runonce_records_bytes", "Bytes that the store's records hold."))
        return families

    def collect(self) -> Iterable[GaugeMetricFamily]:
        records, *size = families = list(self.describe())
        try:
            records.add_metric([], self._store.list(limit=1).total)
        except StoreError as error:
            logging.getLogger("flask_runonce").warning("The records could not be counted: %s", error)
        if isinstance(self._store, MemoryStore):
            size[0].add_metric([], self._store.bytes)
        return families
