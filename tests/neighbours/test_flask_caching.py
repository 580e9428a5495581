"""Flask-Caching: reads are cached, what acts is run once, and no view is both."""

from __future__ import annotations

from typing import Any

import pytest
from webtest import TestApp

from .calls import CHAT, call, replayed

SECTION = "Flask-Caching"


def test_a_read_is_cached_and_a_run_clears_it_once(names: dict[str, Any], service: TestApp) -> None:
    ids = CHAT | {"Coder-Tool-Call-Id": "read"}
    assert service.get("/orders", headers=ids).json == {"items": []}
    names["items"].append("behind the cache's back")
    assert service.get("/orders", headers=ids).json == {"items": []}
    names["items"].clear()
    assert replayed(*[call(service, "/orders", json={"item": "tea"}) for _ in range(2)]) == [False, True]
    assert service.get("/orders", headers=ids).json == {"items": ["tea"]}
    names["items"].append("behind the cache's back")
    assert replayed(call(service, "/orders", json={"item": "tea"})) == [True]
    assert service.get("/orders", headers=ids).json == {"items": ["tea"]}


@pytest.mark.parametrize("above", [True, False])
def test_on_one_view_a_call_gets_another_calls_answer(names: dict[str, Any], service: TestApp, above: bool) -> None:
    once, cached = names["runonce"].once, names["cache"].cached()
    runs = []

    def wrong() -> dict[str, int]:
        runs.append(1)
        return {"number": len(runs)}

    names["app"].post("/wrong")(cached(once(wrong)) if above else once(cached(wrong)))
    assert [call(service, "/wrong", name).json for name in ("a", "b")] == [{"number": 1}] * 2
    assert len(runs) == 1


def test_above_a_refusal_is_cached_too(names: dict[str, Any], service: TestApp) -> None:
    cached = names["cache"].cached()
    names["app"].post("/wrong", endpoint="wrong")(cached(names["runonce"].once(lambda: "done")))
    assert call(service, "/wrong", "a,b").status_int == 400
    assert call(service, "/wrong", "a").status_int == 400
