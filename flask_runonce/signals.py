"""What the library tells while it works (CONTRACT section 8): blinker signals and log lines.

Each signal's sender is the app (the wrapped one, for the middleware). Each is sent with `key`, a `CallKey`
(None for a refusal before the key is known), and:

- `call_started`: nothing more
- `call_finished`: `status` (the number; 500 where the outcome is unknown), `seconds` that the run took, `bytes` of the
  body that is saved, `ended` ("response", "too_large" or "unknown")
- `call_replayed`: `status`, `seconds` that the repeat waited for it
- `call_refused`: `code`, `status`, of a request that would have run; the cancel, list and show routes refuse without it
- `call_canceled`: `state` ("not_received", "running" or "done"), `pending` (the run goes on)
- `call_released`: nothing more
- `call_lost`: `owner`
- `result_cut`: `original_bytes`, `kept_bytes`
"""

from __future__ import annotations

import logging
from typing import Any

from blinker import NamedSignal, Namespace

from .record import CallKey

logger = logging.getLogger("flask_runonce")


def _with_ids(record: logging.LogRecord) -> bool:
    for name in CallKey._fields:
        if not hasattr(record, name):
            setattr(record, name, "")  # a formatter may name the extras of a line that is about no single call
    return True


logger.addFilter(_with_ids)

_namespace = Namespace()

call_started = _namespace.signal("call_started")
call_finished = _namespace.signal("call_finished")
call_replayed = _namespace.signal("call_replayed")
call_refused = _namespace.signal("call_refused")
call_canceled = _namespace.signal("call_canceled")
call_released = _namespace.signal("call_released")
call_lost = _namespace.signal("call_lost")
result_cut = _namespace.signal("result_cut")

_LEVELS = {call_lost.name: logging.WARNING, result_cut.name: logging.INFO, call_canceled.name: logging.INFO}


def tell(signal: NamedSignal, sender: Any, key: CallKey | None, **facts: Any) -> None:
    """Log `signal` and send it. A receiver that raises is logged: telling never changes what becomes of a call."""
    log(_LEVELS.get(signal.name, logging.DEBUG), key, signal.name, facts)
    if signal.receivers:
        try:
            signal.send(sender, key=key, **facts)
        except Exception:
            logger.exception("A receiver of %s raised.", signal.name, extra=_ids(key))


def log(level: int, key: CallKey | None, message: str, facts: object = "", *, exc_info: bool = False) -> None:
    """One line about a call, which carries its IDs as the extras `chat_id` and `tool_call_id`."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", message.replace("_", " "), facts or "", extra=_ids(key), exc_info=exc_info)


def _ids(key: CallKey | None) -> dict[str, str]:
    return (key or CallKey("", "", ""))._asdict()
