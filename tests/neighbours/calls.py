"""How the tests of neighbours send calls."""

from __future__ import annotations

from typing import Any

from webtest import TestApp, TestResponse

CHAT = {"Coder-Chat-Id": "chat"}


def call(service: TestApp, path: str, name: str = "call", headers: dict[str, str] | None = None, **options: Any) -> Any:
    """POST the call `name`, whatever it is answered. `json=` sends that as JSON."""
    send = service.post
    if "json" in options:
        send, options = service.post_json, {"params": options.pop("json")} | options
    return send(path, headers=CHAT | {"Coder-Tool-Call-Id": name} | (headers or {}), status="*", **options)


def cancel(service: TestApp, name: str = "call", headers: dict[str, str] | None = None) -> TestResponse:
    """Cancel it, whatever that is answered."""
    return service.post(f"/api/v0/tool-calls/{name}/cancel", headers=CHAT | (headers or {}), status="*")


def replayed(*replies: TestResponse) -> list[bool]:
    """Which of the answers are repeats of a saved one."""
    return ["Idempotent-Replayed" in reply.headers for reply in replies]
