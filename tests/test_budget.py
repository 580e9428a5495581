from __future__ import annotations

import codecs
import encodings.aliases
import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from flask_runonce.budget import Excerpt, budget_for, cut, cuttable

MARKER = re.compile(r"\[\.\.\. (\d+) bytes left out; narrow the request \.\.\.\]")
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

# The same examples each time, however slow the machine.
steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

budgets = st.integers(64, 600)
# Short texts, repeated: long enough to be cut, of every width of character.
long_texts = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=12), st.integers(1, 200))


def split(text: str) -> tuple[str, int, str]:
    """Return what stands before the one marker, its number, and what stands behind."""
    markers = list(MARKER.finditer(text))
    assert len(markers) == 1
    return text[: markers[0].start()], int(markers[0][1]), text[markers[0].end() :]


def assert_true_cut(original: str, text: str, charset: str = "utf-8", errors: str = "surrogatepass") -> None:
    """Assert that *text* is the beginning and end of *original*, with the true number of bytes between."""
    head, left_out, tail = split(text)
    assert original.startswith(head)
    assert original.endswith(tail)
    sizes = [len(part.encode(charset, errors)) for part in (original, head, tail)]
    assert left_out == sizes[0] - sizes[1] - sizes[2] > 0


def shortened(body: bytes | Excerpt, content_type: str, budget: int) -> bytes:
    """Return the cut body, which must be there and within the budget."""
    result = cut(body, content_type, budget)
    assert result is not None
    assert len(result) <= budget
    return result


@pytest.mark.parametrize(
    ("tokens", "budget"),
    [
        (None, 65_536),
        (1, 16_384),
        (8_191, 16_384),
        (8_192, 16_384),
        (8_193, 16_386),
        (32_768, 65_536),
        (200_000, 400_000),
    ],
)
def test_budget_for_is_half_the_window(tokens: int | None, budget: int) -> None:
    assert budget_for(tokens) == budget


@pytest.mark.parametrize("tokens", [0, -1, -200_000])
def test_budget_for_refuses_a_window_without_tokens(tokens: int) -> None:
    with pytest.raises(ValueError, match="context_tokens"):
        budget_for(tokens)


@pytest.mark.parametrize("tokens", [True, False, 8192.0, "8192", b"", [], float("nan")])
def test_budget_for_refuses_what_is_no_count(tokens: Any) -> None:
    with pytest.raises(TypeError, match="context_tokens"):
        budget_for(tokens)


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "text/html; charset=utf-8",
        "TEXT/CSV",
        "text/event-stream",
        "text/json",
        "application/json",
        "Application/JSON;charset=UTF-8",
        "application/problem+json",
        "application/vnd.api+JSON; profile=x",
    ],
)
def test_text_and_json_are_cuttable(content_type: str) -> None:
    assert cuttable(content_type)
    assert cut(b"x" * 65, content_type, 64) is not None


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/octet-stream",
        "application/jsonl",
        "application/xml",
        "application/zip; name=text/plain",
        "image/png",
        "image/svg+xml",
        "multipart/mixed; boundary=text/plain",
        "textual",
        "x-text/plain",
    ],
)
def test_other_types_are_left_alone(content_type: str) -> None:
    assert not cuttable(content_type)
    assert cut(b"x" * 1000, content_type, 64) is None
    assert cut(Excerpt(b"x" * 64, b"x" * 64, 1000), content_type, 64) is None


@steady
@given(st.text())
def test_any_content_type_is_borne(content_type: str) -> None:
    result = cut(b"x" * 1000, content_type, 100)
    assert (result is not None) == cuttable(content_type)


@steady
@given(st.binary(), st.integers(0, 10), st.sampled_from([TEXT, JSON, "text/plain; charset=utf-16"]))
def test_what_fits_is_left_alone(body: bytes, spare: int, content_type: str) -> None:
    assert cut(body, content_type, len(body) + spare) is None


@pytest.mark.parametrize("content_type", [TEXT, JSON])
def test_an_excerpt_of_a_body_within_the_budget_is_left_alone(content_type: str) -> None:
    assert cut(Excerpt(b"begin", b"end", 1000), content_type, 1000) is None
    assert cut(Excerpt(b"begin", b"end", 1000), content_type, 999) is not None


# Text


def test_text_keeps_two_thirds_from_the_beginning_and_one_third_from_the_end() -> None:
    body = b"".join(b"%07d\n" % i for i in range(10_000))
    result = shortened(body, TEXT, 4096)
    head, left_out, tail = split(result.decode())
    assert abs(len(head) - 2 * len(tail)) <= 2
    assert 4096 - len(result) < 10  # nothing is wasted but digits of the number
    assert body.startswith(head.encode())
    assert body.endswith(tail.encode())
    assert left_out == len(body) - len(head) - len(tail)


@steady
@given(long_texts, budgets)
@example("é" * 100, 100)
@example("a" + "é" * 100, 100)
@example("\U0001f600" * 100, 101)
@example("\ufeff" + "漢" * 100, 102)
def test_text_is_cut_between_characters(text: str, budget: int) -> None:
    body = text.encode()
    assume(len(body) > budget)
    assert_true_cut(text, shortened(body, TEXT, budget).decode())


@steady
@given(st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=5).map(str.encode)), min_size=30), budgets)
@example([b"\xff"] * 100, 64)
@example([b"\xe6\xbc"] * 100, 64)
@example([b"\x80"] * 100, 65)
def test_broken_bytes_stay_and_characters_beside_them_stay_whole(parts: list[bytes], budget: int) -> None:
    body = b"".join(parts)
    assume(len(body) > budget)
    result = shortened(body, TEXT, budget)
    # A prefix of the decoded body is one that splits no character.
    original, text = (data.decode("utf-8", "surrogateescape") for data in (body, result))
    assert_true_cut(original, text, errors="surrogateescape")


def test_without_room_for_the_marker_there_is_only_the_beginning() -> None:
    for budget in range(40):
        assert shortened(b"0123456789" * 10, TEXT, budget) == (b"0123456789" * 10)[:budget]
        assert shortened("é".encode() * 100, TEXT, budget) == "é".encode() * (budget // 2)


# All of the standard library's, but for those that are on Windows only.
CHARSETS = sorted({*encodings.aliases.aliases.values()} - {"mbcs", "oem"})
NO_CHARSETS = ["", "no-such", "hex", "zlib", "undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape"]


@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize("budget", [64, 65, 150, 151, 600])
def test_text_of_every_charset_stays_in_its_charset(charset: str, budget: int) -> None:
    try:
        body = ("Ab1 é漢字かゅ゚한글Ж😀" * 400).encode(charset, "ignore")
    except LookupError:  # a codec, but not of text
        body = b"abc" * 1000
        assert_true_cut(body.decode(), shortened(body, f"text/plain; charset={charset}", budget).decode())
        return
    result = shortened(body, f"text/plain; charset={charset}", budget)
    text, original = result.decode(charset), body.decode(charset)
    if len(marker := MARKER.split(text)) > 1:
        assert original.startswith(marker[0])
        assert original.endswith(marker[2])
    else:  # in wide characters the marker alone is longer than this
        assert budget < 200
        assert original.startswith(text)
    assert budget - len(result) < 40


@pytest.mark.parametrize(
    "charset",
    ["iso-8859-1", "windows-1252", "koi8-r", "gbk", "shift_jis", "euc-kr", "utf-16-le", "utf-16-be", "utf-32-be"],
)
@steady
@given(st.data())
def test_the_number_is_true_in_other_charsets(charset: str, data: st.DataObject) -> None:
    text = data.draw(long_texts).encode(charset, "ignore").decode(charset)
    budget = data.draw(st.integers(260, 600))
    body = text.encode(charset)
    assume(len(body) > budget)
    result = shortened(body, f"text/plain; charset={charset}", budget)
    assert_true_cut(text, result.decode(charset), charset, "strict")


@pytest.mark.parametrize("charset", ["utf-16", "utf-32"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_a_byte_order_mark_stays_and_tells_the_order(charset: str, order: str) -> None:
    text = "漢😀" * 400
    body = ("\ufeff" + text).encode(f"{charset}-{order}")
    result = shortened(body, f"text/plain; charset={charset}", 600)
    assert result[:4] == body[:4]
    assert_true_cut("\ufeff" + text, result.decode(f"{charset}-{order}"), f"{charset}-{order}")
    assert "\ufeff" not in result.decode(charset)


def test_utf_16_without_a_byte_order_mark_is_little_endian() -> None:
    text = "漢😀" * 400
    result = shortened(text.encode("utf-16-le"), "text/plain; charset=utf-16", 600)
    assert_true_cut(text, result.decode("utf-16-le"), "utf-16-le")


@pytest.mark.parametrize("charset", [*NO_CHARSETS, '"a\\0b"', "us-ascii", "utf8", "UTF-8-SIG"])
def test_an_unknown_charset_is_read_as_utf_8(charset: str) -> None:
    text = "\ufeffa.漢\\x😀" * 100
    assert_true_cut(text, shortened(text.encode(), f"text/plain; charset={charset}", 300).decode())


@pytest.mark.parametrize("charset", CHARSETS)
def test_bytes_that_are_broken_in_their_charset_are_borne(charset: str) -> None:
    body = random.Random(charset).randbytes(3000)
    for budget in (64, 301):
        shortened(body, f"text/plain; charset={charset}", budget)
        shortened(Excerpt(body[:budget], body[-budget:], len(body)), f"text/plain; charset={charset}", budget)


# Excerpts of text


@pytest.mark.parametrize("charset", ["utf-8", "utf-16-le", "utf-16", "utf-32", "iso-8859-1"])
@steady
@given(st.data())
def test_an_excerpt_is_cut_like_the_whole(charset: str, data: st.DataObject) -> None:
    body = data.draw(long_texts).replace("\ufffd", "").encode(charset, "ignore")
    budget = data.draw(budgets)
    assume(len(body) > budget)
    content_type = f"text/plain; charset={charset}"
    excerpt = Excerpt(body[:budget], body[-budget:], len(body))
    assert cut(excerpt, content_type, budget) == cut(body, content_type, budget)


@steady
@given(long_texts, budgets, st.integers(0, 100), st.integers(0, 100))
@example("漢" * 200, 200, 10, 10)
@example("漢" * 200, 200, 11, 11)
@example("漢" * 200, 200, 0, 0)
def test_an_excerpt_with_short_ends_is_cut_between_characters(text: str, budget: int, first: int, last: int) -> None:
    body = text.encode()
    assume(len(body) > max(budget, first + last))
    excerpt = Excerpt(body[:first], body[len(body) - last :], len(body))
    assert_true_cut(text, shortened(excerpt, TEXT, budget).decode())


def test_an_excerpt_of_utf_16_is_read_in_step() -> None:
    text = "a漢" * 1000
    body = text.encode("utf-16-be")
    excerpt = Excerpt(body[:501], body[-501:], len(body))
    result = shortened(excerpt, "text/plain; charset=utf-16-be", 501)
    assert_true_cut(text, result.decode("utf-16-be"), "utf-16-be")


# JSON

json_strings = st.one_of(st.text(max_size=8), long_texts, st.just("\ud800 half a pair"))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), json_strings),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=5)),
    max_leaves=12,
)
layouts = st.fixed_dictionaries({"indent": st.sampled_from([None, 2, "\t"]), "ensure_ascii": st.booleans()})


def dump(value: Any, **layout: Any) -> bytes:
    return json.dumps(value, **layout).encode("utf-8", "backslashreplace")


def is_wrapped(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["truncated", "text"]


def pairs_of_strings(before: Any, after: Any) -> list[tuple[str, str]]:
    """Return each string value before and after the cut; everything else must be the same."""
    assert type(before) is type(after)
    if isinstance(before, str):
        return [(before, after)]
    if isinstance(before, dict):
        assert list(before) == list(after)
        before, after = list(before.values()), list(after.values())
    if isinstance(before, list):
        assert len(before) == len(after)
        return [pair for both in zip(before, after, strict=True) for pair in pairs_of_strings(*both)]
    assert before == after
    return []


@steady
@given(json_values, layouts, st.integers(64, 3000))
def test_json_stays_json(value: Any, layout: dict[str, Any], budget: int) -> None:
    body = dump(value, **layout)
    assume(len(body) > budget)
    result = json.loads(shortened(body, JSON, budget))
    if is_wrapped(result):
        assert result["truncated"] == {"original_bytes": len(body)}
        text = result["text"]
        if MARKER.search(text):
            assert_true_cut(body.decode(), text)
        else:
            assert body.decode().startswith(text)
        return
    kept, shorter = [0], []
    for before, after in pairs_of_strings(json.loads(body), result):
        size = len(dump(before, ensure_ascii=False))
        if before == after:
            kept.append(size)
        else:
            assert_true_cut(before, after)
            shorter.append(size)
    assert not shorter or max(kept) < min(shorter)  # the longest are cut, and only they


def test_the_longest_strings_of_json_are_cut() -> None:
    value = {"log": "x" * 5000, "error": "y" * 3000, "name": "z" * 300, "code": 7, "list": [None, True, 1.5, {}]}
    result = shortened(dump(value), JSON, 2000)
    after = json.loads(result)
    assert {key for key in value if after[key] != value[key]} == {"log", "error"}
    assert abs(len(after["log"]) - len(after["error"])) <= 2
    assert_true_cut(value["log"], after["log"])
    assert_true_cut(value["error"], after["error"])
    head, _, tail = split(after["log"])
    assert abs(len(head) - 2 * len(tail)) <= 2
    assert 2000 - len(result) < 20


def test_many_strings_are_cut_to_fill_the_budget() -> None:
    value = [{"id": i, "line": f"{i:06}é\n" * (30 + i % 7)} for i in range(5000)]
    budget = 1_200_000
    result = shortened(dump(value), JSON, budget)
    after = json.loads(result)
    assert [row["id"] for row in after] == list(range(5000))
    for before, row in zip(value, after, strict=True):
        assert_true_cut(str(before["line"]), row["line"])
    assert len(result) > 0.95 * budget


def test_the_same_body_is_cut_the_same_way() -> None:
    body = dump({"a": "x" * 500, "b": ["x" * 500] * 5})
    assert cut(body, JSON, 1500) == cut(body, JSON, 1500)


def test_numbers_names_and_order_stay_as_they_were_written() -> None:
    numbers = "[1.10,-0,-0.0,1E+2,1e400,0.1234567890123456789012345678901234567890," + "9" * 5000 + "]"
    body = '{"z": ' + numbers + ', "a": 1, "a": 2, "long": "' + "x" * 5000 + '", "": {}}'
    result = shortened(body.encode(), JSON, 6000).decode()
    assert result.startswith('{"z":' + numbers + ',"a":1,"a":2,"long":"xxx')
    assert result.endswith('xxx","":{}}')


def test_blanks_and_escapes_go_before_any_string_does() -> None:
    value = {"lines : of": ["one, two : three", 'say "漢字"', "\\"], "n": [1, 2], "e": {}}
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert shortened(dump(value, indent=4), JSON, len(compact)) == compact


def test_half_a_surrogate_pair_stays_the_escape_that_it_was() -> None:
    body = rb'{"half": "\ud800", "cut": "\udc00%s\ud83d"}' % (rb"xxx\ud83d" * 100)
    result = shortened(body, JSON, 200)
    assert result.startswith(rb'{"half":"\ud800","cut":"\udc00xxx')
    assert result.endswith(rb'xxx\ud83d\ud83d"}')
    assert_true_cut(json.loads(body)["cut"], json.loads(result)["cut"])


@pytest.mark.parametrize(
    "content_type", ["text/json", "application/problem+json; charset=iso-8859-1", "APPLICATION/JSON"]
)
def test_every_json_type_is_cut_as_json(content_type: str) -> None:
    result = shortened('{"é": "%s", "n": "%s"}'.encode() % (b"x" * 1000, b"y" * 1000), content_type, 400)
    assert list(json.loads(result)) == ["é", "n"]


@pytest.mark.parametrize("charset", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_json_in_another_encoding_comes_out_as_utf_8(charset: str) -> None:
    value = {"漢": "字" * 1000, "n": 1}
    body = json.dumps(value, ensure_ascii=False).encode(charset)
    after = json.loads(shortened(body, JSON, 300).decode())
    assert list(after) == ["漢", "n"]
    assert_true_cut("字" * 1000, after["漢"])


NOT_TO_BE_CUT = {
    "numbers": dump(list(range(1000))),
    "short strings": dump(["ten bytes."] * 1000),
    "long names": dump({"n" * 1000: 1, "m" * 1000: "x"}),
    "one blank name": b'{"%s" : "x"}' % (b" " * 1000),
    "NaN": b'{"a": NaN, "b": "%s"}' % (b"x" * 1000),
    "-Infinity": b'["%s", -Infinity]' % (b"x" * 1000),
    "cut off": b'{"a": "%s' % (b"x" * 1000),
    "two documents": b'{"a": "%s"} {}' % (b"x" * 1000),
    "control characters": b'["%s"]' % (b"\x01\n" * 1000),
    "no JSON": b"<p>" * 1000,
    "blanks": b" " * 1000,
    "NUL": b"\0" * 1000,
    "nested too deep": b"[" * 100_000 + b"]" * 100_000,
    "nested too deep with strings": b'{"a":' * 100_000 + b'"%s"' % (b"x" * 1000) + b"}" * 100_000,
}


@pytest.mark.parametrize("body", NOT_TO_BE_CUT.values(), ids=NOT_TO_BE_CUT.keys())
@pytest.mark.parametrize("budget", [64, 65, 100, 101, 150, 500])
def test_what_cannot_be_cut_as_json_is_wrapped(body: bytes, budget: int) -> None:
    result = shortened(body, JSON, budget)
    assert result.startswith(b'{"truncated":{"original_bytes":%d},"text":"' % len(body))
    text = json.loads(result)["text"]
    original = body.decode(json.detect_encoding(body))
    if budget >= 150:
        head, left_out, tail = split(text)
        assert original.startswith(head)
        assert original.endswith(tail)
        if json.detect_encoding(body) == "utf-8":
            assert left_out == len(body) - len(head) - len(tail)
    else:
        assert original.startswith(MARKER.split(text)[0])
    assert budget - len(result) < 20


@steady
@given(st.lists(st.binary(max_size=8), min_size=20).map(b"".join), budgets)
@example(b"\xff" * 500, 64)
@example(b"\x1f" * 500, 65)
@example(b'"\\' * 500, 66)
@example(b'{"a":"' + b"\xe9" * 500 + b'"}', 200)
@example(codecs.BOM_UTF8 + b"x" * 500, 200)
@example(codecs.BOM_UTF16_BE + b"x" * 501, 200)
@example(b"\0x" * 250, 200)
def test_any_bytes_become_json_within_the_budget(body: bytes, budget: int) -> None:
    assume(len(body) > budget)
    result = json.loads(shortened(body, JSON, budget).decode())
    assert result["truncated"] == {"original_bytes": len(body)}


def test_a_broken_byte_is_a_question_mark_in_wrapped_text() -> None:
    body = b'{"a": "\xff\xe9 \xe6\xbc\xa2", "b": "' + b"x" * 1000
    result = json.loads(shortened(body, JSON, 200))
    head, left_out, tail = split(result["text"])
    assert head.startswith('{"a": "?? 漢", "b": "xxx')
    assert left_out == len(body) - len(head.encode()) - len(tail)


def test_a_wrapped_text_that_fits_as_utf_8_is_whole() -> None:
    document = '{"no JSON": NaN, "x": "' + "x" * 100 + '"}'
    body = document.encode("utf-32")
    result = json.loads(shortened(body, JSON, 250))
    assert result == {"truncated": {"original_bytes": len(body)}, "text": "\ufeff" + document}


@steady
@given(json_values, layouts, budgets)
def test_an_excerpt_of_json_is_wrapped(value: Any, layout: dict[str, Any], budget: int) -> None:
    body = dump(value, **layout)
    assume(len(body) > 2 * budget)
    excerpt = Excerpt(body[:budget], body[-budget:], len(body))
    result = json.loads(shortened(excerpt, JSON, budget))
    assert result["truncated"] == {"original_bytes": len(body)}
    if MARKER.search(result["text"]):
        assert_true_cut(body.decode(), result["text"])
    else:
        assert body.decode().startswith(result["text"])


@pytest.mark.parametrize("overlap", [0, 1, 100])
def test_an_excerpt_that_is_the_whole_body_is_cut_as_a_whole(overlap: int) -> None:
    body = dump({"a": "漢字" * 300, "b": 1})
    excerpt = Excerpt(body[: 500 + overlap], body[500:], len(body))
    assert cut(excerpt, JSON, 400) == cut(body, JSON, 400)
    assert list(json.loads(shortened(excerpt, JSON, 400))) == ["a", "b"]
