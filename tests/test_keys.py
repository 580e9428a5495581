"""Which IDs there are, the one form that each is kept in, and the ready-made keys (CONTRACT.md sections 2 and 4)."""

from __future__ import annotations

import string
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from flask_runonce import CallKey, RunOnceMiddleware, keys
from flask_runonce.errors import ConfigError, InvalidKey
from tests.plain_app import answer

# The same examples each time, however slow the machine.
steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace(",", "")
CANONICAL = "0af4d6d3-691c-45dd-ac54-55ea97970ebc"
NIL = "00000000-0000-0000-0000-000000000000"

ids = st.text(VISIBLE, min_size=1, max_size=255)
uuids = st.uuids(allow_nil=False)
blanks = st.text(" \t", max_size=3)
scopes = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=255)


def spellings(canonical: str) -> dict[str, str]:
    """A UUID as people and libraries write it."""
    lower = {
        "hyphenated": canonical,
        "bare": canonical.replace("-", ""),
        "braced": f"{{{canonical}}}",
        "braced and bare": f"{{{canonical.replace('-', '')}}}",
        "URN": f"urn:uuid:{canonical}",
    }
    upper = {f"{name}, upper case": text.upper() for name, text in lower.items()}
    mixed = {f"{name}, mixed case": text.title() for name, text in lower.items()}
    return {**lower, **upper, **mixed}


# A text, and the ID that it means. Few UUIDs, so that two texts often mean the same one.
meant = st.one_of(
    st.text("ab01-{}", min_size=1, max_size=20).map(lambda text: (text, text)),
    st.sampled_from([CANONICAL, "1" + CANONICAL[1:], CANONICAL[:-1] + "d"]).flatmap(
        lambda canonical: st.sampled_from([*spellings(canonical).values()]).map(lambda text: (text, canonical))
    ),
)


def environ_of(tool_call_id: str | None = "call-1", chat_id: str | None = "chat-1", **more: str) -> dict[str, Any]:
    sent = {"HTTP_CODER_CHAT_ID": chat_id, "HTTP_CODER_TOOL_CALL_ID": tool_call_id, **more}
    return {name: value for name, value in sent.items() if value is not None}


# IDs


@pytest.mark.parametrize("character", VISIBLE)
def test_each_visible_character_is_an_id(character: str) -> None:
    assert keys.canonical_id(character) == character


@pytest.mark.parametrize("length", [1, 254, 255])
def test_an_id_has_up_to_255_characters(length: int) -> None:
    assert keys.canonical_id("x" * length) == "x" * length


REFUSED = {
    "empty": ("", "is empty"),
    "blanks alone": (" \t ", "is empty"),
    "256 characters": ("x" * 256, "is longer than 255 characters"),
    "a comma": ("a,b", "has a comma, or its header was sent twice"),
    "a header sent twice, as servers join it": ("call-1,call-1", "has a comma, or its header was sent twice"),
    "a header sent twice, joined with a blank": ("call-1, call-2", "has a comma, or its header was sent twice"),
    "a header sent twice, empty": (",", "has a comma, or its header was sent twice"),
    "a blank within": ("a b", "has characters other than visible ASCII"),
    "a tab within": ("a\tb", "has characters other than visible ASCII"),
    "a line's end": ("call-1\n", "has characters other than visible ASCII"),
    "a NUL": ("a\0", "has characters other than visible ASCII"),
    "a DEL": ("a\x7f", "has characters other than visible ASCII"),
    "a byte over 127": ("caf\xe9", "has characters other than visible ASCII"),
    "a no-break space around": ("\xa0call-1", "has characters other than visible ASCII"),
    "a digit of another script": ("\u0661", "has characters other than visible ASCII"),
    **{f"the nil UUID, {name}": (text, "is the nil UUID") for name, text in spellings(NIL).items()},
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_an_id_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidKey, match=f"^The chat ID {problem}") as caught:
        keys.canonical_id(text, "chat ID")
    assert caught.value.what == "chat ID"


@pytest.mark.parametrize("spelling", spellings(CANONICAL).values(), ids=spellings(CANONICAL))
def test_each_spelling_of_a_uuid_is_the_same_id(spelling: str) -> None:
    assert keys.canonical_id(spelling) == CANONICAL


NO_UUIDS = {
    "a hyphen too few": CANONICAL.replace("-", "", 1),
    "hyphens elsewhere": "0af4d6d3691c-45dd-ac54-55ea-97970ebc",
    "a digit too many": CANONICAL + "0",
    "a letter that is no digit": CANONICAL.replace("f", "g"),
    "open braces": "{" + CANONICAL,
    "closed braces": CANONICAL + "}",
    "a brace at the start alone": "{" + CANONICAL + "x",
    "a brace at the end alone": "x" + CANONICAL + "}",
    "double braces": "{{" + CANONICAL + "}}",
    "another URN": "urn:oid:" + CANONICAL,
    "braces alone": "{}",
    "one brace": "{",
}


@pytest.mark.parametrize("text", NO_UUIDS.values(), ids=NO_UUIDS)
def test_what_is_no_uuid_is_kept_as_it_is(text: str) -> None:
    assert keys.canonical_id(text.upper()) == text.upper()


def test_ids_differ_by_case_where_they_are_no_uuids() -> None:
    assert keys.canonical_id("Call-1") != keys.canonical_id("call-1")


@given(st.text(max_size=300) | st.text(string.printable, max_size=300) | ids)
@example("x" * 256)
@steady
def test_an_id_is_canonical_or_refused(text: str) -> None:
    try:
        canonical = keys.canonical_id(text)
    except InvalidKey:
        return
    assert 1 <= len(canonical) <= 255
    assert set(canonical) <= set(VISIBLE)
    assert keys.canonical_id(canonical) == canonical


@given(ids, blanks, blanks)
@steady
def test_blanks_around_an_id_do_not_count(text: str, before: str, after: str) -> None:
    assume(text.strip("{}").replace("-", "").strip("0"))
    assert keys.canonical_id(before + text + after) == keys.canonical_id(text)


@given(uuids)
@steady
def test_every_uuid_has_one_form(value: uuid.UUID) -> None:
    assert {keys.canonical_id(text) for text in spellings(str(value)).values()} == {str(value)}


@given(meant, meant)
@example((CANONICAL, CANONICAL), (CANONICAL.upper(), CANONICAL))
@steady
def test_only_spellings_of_one_uuid_are_the_same_id(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (keys.canonical_id(one[0]) == keys.canonical_id(other[0])) == (one[1] == other[1])


# The key of a request


def test_the_two_headers_are_the_key() -> None:
    assert keys.tool_call(environ_of()) == CallKey("", "chat-1", "call-1")


def test_both_ids_are_canonical() -> None:
    found = keys.tool_call(environ_of(f"{{{CANONICAL.upper()}}}", f" {CANONICAL.replace('-', '')}\t"))
    assert found == CallKey("", CANONICAL, CANONICAL)


@pytest.mark.parametrize(("tool_call_id", "chat_id"), [(None, "chat-1"), ("call-1", None), (None, None)])
def test_a_request_without_both_headers_is_no_call(tool_call_id: str | None, chat_id: str | None) -> None:
    assert keys.tool_call(environ_of(tool_call_id, chat_id)) is None


@pytest.mark.parametrize("text", [text for text, _ in REFUSED.values()], ids=REFUSED)
def test_a_malformed_tool_call_id_is_refused_also_without_a_chat_id(text: str) -> None:
    with pytest.raises(InvalidKey, match="tool call ID"):
        keys.tool_call(environ_of(text, None))


@pytest.mark.parametrize("text", [text for text, _ in REFUSED.values()], ids=REFUSED)
def test_a_malformed_chat_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidKey, match="chat ID"):
        keys.tool_call(environ_of("call-1", text))


def test_a_malformed_chat_id_alone_is_no_call() -> None:
    assert keys.tool_call(environ_of(None, "a,b")) is None


def test_other_headers_may_carry_the_ids() -> None:
    environ = environ_of(HTTP_X_CONVERSATION="chat-2", HTTP_X_CALL="call-2")
    assert keys.tool_call(environ, "X-Conversation", "x-call") == CallKey("", "chat-2", "call-2")


_key: Any = CallKey
NO_KEYS = [("", "chat-1", "call-1"), "call-1", 0, _key("", "chat-1", 1), _key(None, "chat-1", "call-1")]


@pytest.mark.parametrize("wrong", NO_KEYS, ids=repr)
def test_a_key_callables_answer_is_checked(wrong: Any) -> None:
    with pytest.raises(TypeError, match="CallKey of three strings"):
        keys.canonical_key(wrong)


def test_a_key_callables_ids_are_made_canonical() -> None:
    assert keys.canonical_key(CallKey("t", CANONICAL.upper(), " call-1 ")) == CallKey("t", CANONICAL, "call-1")


@pytest.mark.parametrize("key", [CallKey("", "", "call-1"), CallKey("", "chat-1", "a,b")])
def test_a_key_callables_ids_are_refused(key: CallKey) -> None:
    with pytest.raises(InvalidKey):
        keys.canonical_key(key)


# Scopes


def test_no_scope_is_the_empty_scope() -> None:
    assert keys.canonical_scope(None) == ""


@given(scopes)
@example("x" * 255)
@example("Zoë, 42 / a b")
@steady
def test_a_scope_is_kept_as_it_is(scope: str) -> None:
    assert keys.canonical_scope(scope) == scope


@pytest.mark.parametrize(
    "scope", ["x" * 256, "\0", "a\nb", "\x1f", "\x7f", "\x80", "\x9f", "\ud800"], ids=lambda scope: ascii(scope[:4])
)
def test_a_scope_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match="at most 255 characters and no control characters"):
        keys.canonical_scope(scope)


@pytest.mark.parametrize("scope", [7, b"tenant", uuid.UUID(CANONICAL), False])
def test_a_scope_is_a_string(scope: Any) -> None:
    with pytest.raises(TypeError, match="string or None"):
        keys.canonical_scope(scope)


def test_a_key_callables_scope_is_checked() -> None:
    with pytest.raises(ValueError, match="control characters"):
        keys.canonical_key(CallKey("\0", "chat-1", "call-1"))


# What a store keeps a key under


def test_a_digest_is_the_same_in_every_release() -> None:
    assert CallKey("tenant", "chat-1", "call-1").digest == "eb9f8f424e2209cdba4bc84aa8096e75"


@given(st.tuples(scopes, ids, ids), st.tuples(scopes, ids, ids))
@example(("a", "b", "c"), ("", "ab", "c"))
@example(("", "ab", "c"), ("", "a", "bc"))
@example(("a", "b", "c"), ("A", "b", "c"))
@steady
def test_digests_of_different_keys_differ(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    digests = {CallKey(*one).digest, CallKey(*other).digest}
    assert len(digests) == (1 if one == other else 2)
    assert all(len(digest) == 32 and set(digest) <= set("0123456789abcdef") for digest in digests)


# The ready-made key of the IETF's draft

IDEMPOTENCY_KEYS = {
    "a token": ("8e03978e", "8e03978e"),
    "a quoted string": ('"8e03978e"', "8e03978e"),
    "a quoted string with blanks around": (' "8e03978e"\t', "8e03978e"),
    "a quoted UUID, upper case": (f'"{CANONICAL.upper()}"', CANONICAL),
    "escaped quotation marks": (r'"a\"b"', 'a"b'),
    "an escaped backslash": (r'"a\\b"', "a\\b"),
    "an escaped backslash before a quotation mark": (r'"a\\\"b"', '\\"'.join("ab")),
    "a quotation mark at the start only": ('"a', '"a'),
    "a quotation mark alone": ('"', '"'),
}


@pytest.mark.parametrize(("value", "expected"), IDEMPOTENCY_KEYS.values(), ids=IDEMPOTENCY_KEYS)
def test_an_idempotency_key_is_the_tool_call_id(value: str, expected: str) -> None:
    assert keys.idempotency_key({"HTTP_IDEMPOTENCY_KEY": value}) == CallKey("", "-", expected)


def test_a_request_without_an_idempotency_key_is_no_call() -> None:
    assert keys.idempotency_key(environ_of()) is None


@pytest.mark.parametrize("value", ["", '""', '" "', '"a", "b"', '"a","a"', '"a,b"', '"caf\xe9"', "x" * 256, f'"{NIL}"'])
def test_a_malformed_idempotency_key_is_refused(value: str) -> None:
    with pytest.raises(InvalidKey, match="idempotency key"):
        keys.idempotency_key({"HTTP_IDEMPOTENCY_KEY": value})


def test_an_idempotency_key_of_255_characters_may_be_quoted() -> None:
    assert keys.idempotency_key({"HTTP_IDEMPOTENCY_KEY": f'"{"x" * 255}"'}) == CallKey("", "-", "x" * 255)


def test_an_idempotency_key_needs_a_scope() -> None:
    with pytest.raises(ConfigError, match="scope") as caught:
        RunOnceMiddleware(answer(), key=keys.idempotency_key, guard=lambda environ: None)
    assert caught.value.name == "scope"
