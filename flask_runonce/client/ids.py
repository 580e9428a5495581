"""Tool call IDs that every replica and every retry works out alike (CONTRACT section 9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from uuid import UUID, uuid5

NAMESPACE = UUID("0af4d6d3-691c-45dd-ac54-55ea97970ebc")


def tool_call_id(chat_id: UUID | str, message_id: int, provider_id: str) -> str:
    """The ID of one tool call, from what a chat server has stored about it.

    It is the UUIDv5 of ``<chat>/<message id>/<provider id>``, so whoever reads the same message gets the same ID. A
    chat ID that is a UUID counts in its lower-case hyphenated form, however it is written.
    """
    return str(uuid5(NAMESPACE, f"{_canonical(chat_id)}/{message_id}/{provider_id}"))


def tool_call_ids(chat_id: UUID | str, message_id: int, provider_ids: Iterable[str]) -> dict[str, str]:
    """Provider ID to tool call ID, for the calls of one message.

    A provider ID that is empty or occurs twice does not name one call, so it is not in the result: such a call is sent
    without an ID, once.
    """
    counts = Counter(provider_ids)
    return {
        provider_id: tool_call_id(chat_id, message_id, provider_id)
        for provider_id, count in counts.items()
        if provider_id and count == 1
    }


def _canonical(chat_id: UUID | str) -> str:
    try:
        return str(UUID(str(chat_id)))
    except ValueError:
        return str(chat_id)
