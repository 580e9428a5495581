"""prometheus-client: the section's app serves its metrics."""

from __future__ import annotations

import re
from typing import Any

from webtest import TestApp

from flask_runonce import signals

from .calls import call, cancel
from .conftest import PAGE

SECTION = "prometheus-client"


def test_the_metrics_are_served(service: TestApp) -> None:
    for name in ("a", "a", "b", "a,b"):
        call(service, "/orders", name)
    cancel(service, "c")
    page = service.get("/metrics").text
    for line in (
        'runonce_calls_total{outcome="finished"} 2.0',
        'runonce_calls_total{outcome="replayed"} 1.0',
        'runonce_refusals_total{code="invalid_key"} 1.0',
        'runonce_cancels_total{state="not_received"} 1.0',
        'runonce_run_seconds_count{status="201"} 2.0',
        "runonce_wait_seconds_count 1.0",
        "runonce_records 3.0",
    ):
        assert f"\n{line}\n" in page, line


def test_the_table_of_metrics(names: dict[str, Any]) -> None:
    described = dict(re.findall(r"^\| `(runonce_\w+)` \| (?:`(\w+)`)? ?\|", PAGE.read_text("utf-8"), re.MULTILINE))
    facts = {"status": 200, "seconds": 1, "code": "canceled", "state": "done", "original_bytes": 2, "kept_bytes": 1}
    facts |= {"bytes": 3, "ended": "response"}
    for name in dir(signals):
        if name.startswith(("call_", "result_")):
            getattr(signals, name).send(names["app"], key=None, **facts)
    there = {}
    for metric in names["registry"].collect():
        labels = {label for sample in metric.samples for label in sample.labels if label != "le"}
        there[metric.name + ("_total" if metric.type == "counter" else "")] = "".join(labels)
    assert described == there
