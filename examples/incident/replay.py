"""Replays the incident against a running service with real HTTP, and counts.

The service is `examples.incident`; any server may serve it. A server that handles one request at a time queues the
attempts instead of letting them wait for the run; the counts are the same.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

ATTEMPTS = 36
PREFIX = "/api/v0/tool-calls"


@dataclass(frozen=True)
class Reply:
    """One answer: the status, whether it came from the record, the body, and the seconds it took."""

    status: int
    replayed: bool
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Service:
    """The service at `url`, as a client sees it."""

    url: str

    def send(self, method: str, path: str, *, chat: str = "", call: str = "", data: Any = None) -> Reply:
        """Send one request. `data` is bytes, or a value for a JSON body."""
        headers = {"Coder-Chat-Id": chat, "Coder-Tool-Call-Id": call}
        headers = {name: value for name, value in headers.items() if value}
        body = data if isinstance(data, bytes) or data is None else json.dumps(data).encode()
        if body is not None:
            headers["Content-Type"] = "application/octet-stream" if body is data else "application/json"
        began = time.monotonic()
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            replayed = response.headers.get("Idempotent-Replayed") == "true"
            return Reply(response.status, replayed, response.read(), time.monotonic() - began)
        finally:
            connection.close()

    def start(self, chat: str, call: str, command: str, seconds: float = 0) -> Reply:
        return self.send("POST", "/commands", chat=chat, call=call, data={"command": command, "seconds": seconds})

    def cancel(self, chat: str, call: str) -> Reply:
        return self.send("POST", f"{PREFIX}/{quote(call, safe='')}/cancel", chat=chat)

    def show(self, chat: str, call: str) -> Reply:
        return self.send("GET", f"{PREFIX}/{quote(call, safe='')}", chat=chat)

    def starts(self, command: str) -> int:
        """How often the service has started `command`."""
        return int(self.send("GET", "/starts").json.get(command, 0))


@dataclass
class Report:
    """What was seen, as lines for a person, and what was not as it should be."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def expect(self, what: str, seen: object, wanted: object) -> None:
        """Note a count, and a fault where it is wrong."""
        right = seen == wanted
        self.say(f"    {what:44} {seen!s:>12}" + ("" if right else f"   WRONG: expected {wanted}"))
        if not right:
            self.faults.append(f"{what}: {seen}, expected {wanted}")


def replay(url: str, *, one_at_a_time: bool = False) -> Report:
    """Replay the incident against the service at `url`, which may have served before."""
    service, report = Service(url), Report()
    marker = uuid.uuid4().hex[:8]  # so that a second replay finds none of the first one's calls
    _storm(service, report, f"storm-{marker}")
    _cancel_before(service, report, f"before-{marker}")
    _cancel_during(service, report, f"during-{marker}", found="done" if one_at_a_time else "running")
    _two_chats(service, report, f"shared-{marker}")
    return report


def _storm(service: Service, report: Report, call: str) -> None:
    report.say(f"1. One call is sent {ATTEMPTS} times at once, while it runs")
    together = threading.Barrier(ATTEMPTS)

    def attempt(_: int) -> Reply:
        together.wait()
        return service.start("chat-1", call, call, seconds=1)

    with ThreadPoolExecutor(ATTEMPTS) as pool:
        replies = list(pool.map(attempt, range(ATTEMPTS)))
    report.expect("attempts", len(replies), ATTEMPTS)
    report.expect("starts", service.starts(call), 1)
    report.expect("answers that are 201 and equal", _equal(replies), ATTEMPTS)
    report.expect("answered from the record, after waiting", sum(reply.replayed for reply in replies), ATTEMPTS - 1)
    slowest = max(reply.seconds for reply in replies)
    report.say(f"    the run took 1 s; the last answer came after {slowest:.1f} s")

    report.say("2. It is sent once more, after it ended")
    again = service.start("chat-1", call, call, seconds=1)
    report.expect("answer", again.status, 201)
    report.expect("answered from the record", again.replayed, True)
    report.expect("the same answer", again.body == replies[0].body, True)
    report.expect("starts", service.starts(call), 1)
    report.expect("repeats that the record counts", service.show("chat-1", call).json.get("repeats"), ATTEMPTS)


def _cancel_before(service: Service, report: Report, call: str) -> None:
    report.say("3. A call is canceled before it comes")
    canceled = service.cancel("chat-1", call)
    report.expect("cancel's answer: received", canceled.json.get("received"), False)
    late = service.start("chat-1", call, call)
    report.expect("the late call's answer", f"{late.status} {late.json.get('code')}", "409 canceled")
    report.expect("starts", service.starts(call), 0)


def _cancel_during(service: Service, report: Report, call: str, found: str) -> None:
    report.say("4. A call is canceled while it runs")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(service.start, "chat-1", call, call, 3)
        while service.show("chat-1", call).status == 404 and not first.done():
            time.sleep(0.02)  # the service has not received it yet
        canceled = service.cancel("chat-1", call).json
    report.expect("cancel's answer: state", canceled.get("state"), found)
    saved = json.loads(base64.b64decode(canceled.get("body", "e30=")))
    report.expect("cancel's answer is the run's own answer", saved == first.result().json, True)
    report.expect("the run was stopped by it", saved.get("stopped"), found == "running")
    late = service.start("chat-1", call, call, 3)
    report.expect("a late retry's answer", f"{late.status} {late.json.get('code')}", "409 canceled")
    report.expect("starts", service.starts(call), 1)


def _two_chats(service: Service, report: Report, call: str) -> None:
    report.say("5. Two chats use the same tool call ID")
    replies = [service.start(chat, call, call) for chat in ("chat-1", "chat-2", "chat-1", "chat-2")]
    report.expect("starts", service.starts(call), 2)
    report.expect("answers from the records", sum(reply.replayed for reply in replies), 2)
    numbers = [reply.json["number"] for reply in replies]
    report.expect("each chat got its own answer", numbers[0] != numbers[1] and numbers[:2] == numbers[2:], True)


def _equal(replies: list[Reply]) -> int:
    return sum(reply.status == 201 and reply.body == replies[0].body for reply in replies)
