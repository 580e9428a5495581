"""Tool calls and their results in the message formats of two providers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]


class ToolCall(NamedTuple):
    """A call that the model asks for. ``arguments`` is None where they are no JSON object."""

    provider_id: str
    name: str
    arguments: dict[str, Any] | None


class Format(NamedTuple):
    """``calls`` reads those of any message; ``results`` makes the messages that answer them, a result for each call."""

    calls: Callable[[Message], list[ToolCall]]
    results: Callable[[Sequence[ToolCall], Sequence[Mapping[str, Any]]], list[Message]]


def _openai_calls(message: Message) -> list[ToolCall]:
    calls = message.get("tool_calls") or []
    return [
        ToolCall(call["id"], call["function"]["name"], _json_object(call["function"]["arguments"])) for call in calls
    ]


def _openai_results(calls: Sequence[ToolCall], results: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call.provider_id, "content": json.dumps(result)}
        for call, result in zip(calls, results, strict=True)
    ]


def _anthropic_calls(message: Message) -> list[ToolCall]:
    blocks = message["content"] if isinstance(message["content"], list) else []
    return [ToolCall(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def _anthropic_results(calls: Sequence[ToolCall], results: Sequence[Mapping[str, Any]]) -> list[Message]:
    blocks = [
        {
            "type": "tool_result",
            "tool_use_id": call.provider_id,
            "content": json.dumps(result),
            "is_error": not result["success"],
        }
        for call, result in zip(calls, results, strict=True)
    ]
    return [{"role": "user", "content": blocks}]


def _json_object(text: str) -> dict[str, Any] | None:
    """A model writes its arguments itself, so they may be anything."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


FORMATS = {
    "openai": Format(_openai_calls, _openai_results),
    "anthropic": Format(_anthropic_calls, _anthropic_results),
}
