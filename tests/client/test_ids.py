from uuid import UUID

import pytest

from flask_runonce.client import tool_call_id, tool_call_ids

CHAT = "11111111-1111-1111-1111-111111111111"
GOLDEN = "ca92e3e7-ee42-5889-b1df-75869f9117ee"


@pytest.mark.parametrize("chat_id", [CHAT, UUID(CHAT), "1" * 32, f"urn:uuid:{CHAT}", f"{{{CHAT}}}"])
def test_the_golden_id_whatever_the_spelling_of_the_chat(chat_id):
    assert tool_call_id(chat_id, 42, "call_1") == GOLDEN


def test_upper_case_chat_ids_are_the_same_chat():
    chat_id = "abcdefab-cdef-abcd-efab-cdefabcdefab"
    assert tool_call_id(chat_id.upper(), 1, "a") == tool_call_id(chat_id, 1, "a")


def test_each_part_counts():
    ids = {
        tool_call_id("a chat that is no UUID", 42, "call_1"),
        tool_call_id(CHAT, 42, "call_1"),
        tool_call_id(CHAT, 43, "call_1"),
        tool_call_id(CHAT, 42, "call_2"),
        tool_call_id(CHAT, 42, "CALL_1"),
    }
    assert len(ids) == 5


def test_empty_and_doubled_provider_ids_get_none():
    ids = tool_call_ids(CHAT, 42, ["call_1", "", "twice", "call_2", "twice"])
    assert ids == {"call_1": GOLDEN, "call_2": tool_call_id(CHAT, 42, "call_2")}
