"""`examples/incident` on real servers: the same results on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.incident.replay import Service, replay

from .servers import SERVERS, serve


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with serve(request.param, "examples.incident:create_app", log=log) as url:
        yield request.param, url


def test_the_incident_is_replayed_with_every_count_right(server: tuple[str, str]) -> None:
    name, url = server
    report = replay(url, one_at_a_time=name == "gunicorn sync")
    assert report.faults == []


def test_bodies_of_4_mib_leave_the_next_answer_whole(server: tuple[str, str]) -> None:
    service = Service(server[1])
    body = b"x" * (4 * 2**20)
    first = service.send("POST", "/files", chat="large", call="upload", data=body)
    assert first.json["bytes"] == len(body)
    for _ in range(10):
        repeat = service.send("POST", "/files", chat="large", call="upload", data=body)
        assert (repeat.status, repeat.replayed, repeat.body) == (200, True, first.body)
    for _ in range(10):
        refused = service.send("POST", "/commands", chat="large", call="upload", data=body)
        assert (refused.status, refused.json["code"]) == (409, "input_mismatch")
    service.cancel("large", "never")
    for _ in range(10):
        refused = service.send("POST", "/files", chat="large", call="never", data=body)
        assert (refused.status, refused.json["code"]) == (409, "canceled")
    for _ in range(10):
        refused = service.send("POST", "/files", chat="large", call="a,b", data=body)
        assert (refused.status, refused.json["code"]) == (400, "invalid_key")
