"""OpenTelemetry: the span of a request says what became of its call (extra `otel`).

- `runonce.outcome`: "finished", "replayed", "refused", "released" or, of a cancel, "canceled"
- `runonce.<fact>`: what the signal says besides, as `runonce.code` of a refusal, or `runonce.seconds` that a run took
  or a repeat waited
- `gen_ai.conversation.id`, `gen_ai.tool.call.id`: the chat ID and the tool call ID, by the names that OpenTelemetry's
  conventions have for them. The scope is left out: it may name a person
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blinker import ANY
from opentelemetry import trace

from .. import CallKey, signals


def instrument(sender: Any = ANY) -> None:
    """Have the span that is current while a call is answered say what became of it.

    `sender` is the Flask app, or the app that the middleware wraps; without it, all apps of the process.
    """
    for signal, receiver in _RECEIVERS:
        signal.connect(receiver, sender)


def _saying(**said: str) -> Callable[..., None]:
    def receiver(_: Any, *, key: CallKey | None, **facts: Any) -> None:
        span = trace.get_current_span()
        if not span.is_recording():  # none, or one that ended before a streamed body did
            return
        ids = {"gen_ai.conversation.id": key.chat_id, "gen_ai.tool.call.id": key.tool_call_id} if key else {}
        span.set_attributes(ids | {f"runonce.{name}": value for name, value in (said | facts).items()})

    return receiver


_RECEIVERS = (
    (signals.call_finished, _saying(outcome="finished")),
    (signals.call_replayed, _saying(outcome="replayed")),
    (signals.call_refused, _saying(outcome="refused")),
    (signals.call_released, _saying(outcome="released")),
    (signals.call_canceled, _saying(outcome="canceled")),
    (signals.call_lost, _saying()),
    (signals.result_cut, _saying()),
)
