"""Bound a result by bytes, so that it fits the model that reads it (CONTRACT section 4, ``result_budget``).

Text keeps its first two thirds and its last third, with a marker between. JSON stays JSON: everything but its longest
string values is kept as it was written, and those are cut like text. A document that string cuts cannot make fit, or
that is no JSON to begin with, is put as cut text into a small JSON object. Nothing here does I/O.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

from werkzeug.http import parse_options_header

_BYTES_PER_TOKEN = 4
_LEAST_BUDGET = 16 * 1024
_BUDGET_OF_UNKNOWN_WINDOW = 64 * 1024

# ASCII is UTF-8, and so is what follows a UTF-8 byte order mark, which is kept as a character of the text. The others
# are codecs of Python that no text comes in.
_READ_AS_UTF_8 = {"ascii", "utf-8-sig", "idna", "punycode", "unicode-escape", "raw-unicode-escape"}
# What our decoders make of the rest of a character whose beginning is missing.
_SPLIT_CHARACTER = "\ufffd" + "".join(map(chr, range(0xDC80, 0xDCC0)))

_COLON = re.compile(r"\s*:")

_Encode = Callable[[str], bytes]


class Excerpt(NamedTuple):
    """A body too long to hold: its first bytes, its last bytes and its length in bytes.

    ``head`` and ``tail`` as long as the budget are enough.
    """

    head: bytes
    tail: bytes
    total: int


def budget_for(context_tokens: int | None) -> int:
    """Return the bytes that one result may take of a model's context window.

    That is half the window at 4 bytes a token, and at least 16 KiB. *context_tokens* is the window's size in tokens;
    None, where it is unknown, gives 64 KiB. Raises TypeError for what is no whole number, ValueError for one below 1.
    """
    if context_tokens is None:
        return _BUDGET_OF_UNKNOWN_WINDOW
    if isinstance(context_tokens, bool) or not isinstance(context_tokens, int):
        raise TypeError(f"context_tokens must be an int or None, not {context_tokens!r}")
    if context_tokens < 1:
        raise ValueError(f"context_tokens must be at least 1, not {context_tokens}")
    return max(_LEAST_BUDGET, context_tokens * _BYTES_PER_TOKEN // 2)


def cuttable(content_type: str) -> bool:
    """Tell whether a body of this Content-Type may be cut: ``text/*`` and JSON."""
    mimetype = parse_options_header(content_type)[0].lower()
    return mimetype.startswith("text/") or _is_json(mimetype)


class _Text(NamedTuple):
    """A decoded body or JSON string."""

    head: str
    tail: str | None  # None: head is the whole text
    total: int  # bytes
    encode: _Encode  # into the bytes that total counts


def cut(body: bytes | Excerpt, content_type: str, budget: int) -> bytes | None:
    """Return *body* cut to at most *budget* bytes, or None where it may stay as it is.

    It stays when it is within the budget or its type is not :func:`cuttable`. Text stays in the charset of
    *content_type*, UTF-8 where that is unknown. JSON comes out as UTF-8, as RFC 8259 section 8.1 demands. The budget
    holds from 64 bytes up.
    """
    total = body.total if isinstance(body, Excerpt) else len(body)
    if total <= budget or not cuttable(content_type):
        return None
    if isinstance(body, Excerpt) and (overlap := len(body.head) + len(body.tail) - total) >= 0:
        body = body.head + body.tail[overlap:]
    start = body.head if isinstance(body, Excerpt) else body
    mimetype, parameters = parse_options_header(content_type)
    if not _is_json(mimetype.lower()):
        text = _decode(body, _charset(parameters.get("charset", "utf-8"), start))
        return _shorten(text, budget, text.encode)
    # Not the charset parameter: RFC 8259 section 11 gives it no meaning.
    text = _decode(body, _charset(json.detect_encoding(start), start))
    document = _cut_json(text.head, budget) if text.tail is None else None
    return document or _wrap(text, budget)


def _is_json(mimetype: str) -> bool:
    return mimetype in ("application/json", "text/json") or (
        mimetype.startswith("application/") and mimetype.endswith("+json")
    )


def _charset(label: str, start: bytes) -> str:
    """Return the codec of the body that begins with *start*, one that adds no byte order mark when it encodes."""
    try:
        name = codecs.lookup(label).name
        "".encode(name)
    except (LookupError, ValueError):  # unknown, or a codec but not of text
        return "utf-8"
    if name in ("utf-16", "utf-32"):
        return name + ("-be" if start.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)) else "-le")
    return "utf-8" if name in _READ_AS_UTF_8 else name


def _decode(body: bytes | Excerpt, charset: str) -> _Text:
    """Return the text, where it is an excerpt without the characters that it splits."""
    errors = "surrogateescape" if charset == "utf-8" else "replace"

    def encode(text: str) -> bytes:
        return text.encode(charset, errors)

    if isinstance(body, bytes):
        return _Text(body.decode(charset, errors), None, len(body), encode)
    head = codecs.getincrementaldecoder(charset)(errors).decode(body.head)  # keeps back what is not complete
    unit = {"utf-16": 2, "utf-32": 4}.get(charset[:6], 1)
    tail = body.tail[(len(body.tail) - body.total) % unit :].decode(charset, errors)
    return _Text(head, tail.lstrip(_SPLIT_CHARACTER), body.total, encode)


def _marker(left_out: int) -> str:
    return f"[... {left_out} bytes left out; narrow the request ...]"


def _shorten(text: _Text, room: int, write: _Encode) -> bytes:
    """Return at most *room* bytes: what *write* makes of the text's beginning, a marker and its end."""
    if text.tail is None and len(whole := write(text.head)) <= room:
        return whole
    head, tail = text.head, text.head if text.tail is None else text.tail
    space = room - len(write(_marker(text.total)))
    if space < 0:
        return write(_longest(lambda n: head[:n], max(room, 0), write))
    first = _longest(lambda n: head[:n], space - space // 3, write)
    last = _longest(lambda n: tail[max(len(tail) - n, 0) :], space // 3, write)
    left_out = text.total - len(text.encode(first)) - len(text.encode(last))
    return write(first + _marker(left_out) + last)


def _longest(take: Callable[[int], str], room: int, write: _Encode) -> str:
    """Return the longest of ``take(0)``, ``take(1)``, … that is written in *room* bytes."""
    most = take(room)  # no character takes less than a byte
    if len(write(most)) <= room:
        return most
    return take(bisect_right(range(room), room, key=lambda n: len(write(take(n)))) - 1)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Numbers are only checked, never converted: Python refuses very long ones.
_decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_json)
_encoder = json.JSONEncoder(ensure_ascii=False)


def _escape(text: str, errors: str = "backslashreplace") -> bytes:
    """Return the inside of a JSON string. Half a surrogate pair, which UTF-8 cannot hold, stays the escape it was."""
    return _encoder.encode(text)[1:-1].encode("utf-8", errors)


def _utf_8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _squeeze(structure: str) -> bytes:
    return "".join(structure.split()).encode()


def _cut_json(text: str, budget: int) -> bytes | None:
    """Return the document with its longest string values cut, or None where it is no JSON or that is not enough."""
    text = text.removeprefix("\ufeff")
    try:
        text.encode()  # fails where bytes were broken
        _decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    # Where a marker would be most of what is left, the beginning and the end of the whole document say more.
    least = 2 * len(_marker(len(text)))
    pieces: list[bytes] = []  # in turn: structure up to and from the quotes, the string between them
    values: dict[int, str] = {}  # the strings that may be cut, by their place in pieces; the others are names
    fixed = shortest = end = 0
    while (start := text.find('"', end)) >= 0:
        structure = _squeeze(text[max(end - 1, 0) : start + 1])
        string, end = _decoder.raw_decode(text, start)
        pieces += structure, _escape(string)
        fixed += len(structure)
        if _COLON.match(text, end):
            fixed += len(pieces[-1])
        else:
            values[len(pieces) - 1] = string
            shortest += min(len(pieces[-1]), least)
        if fixed + shortest > budget:
            return None
    pieces.append(_squeeze(text[max(end - 1, 0) :]))
    fixed += len(pieces[-1])
    if fixed + shortest > budget:
        return None
    limit = _limit(sorted(len(pieces[i]) for i in values), budget - fixed)
    for i, string in values.items():
        if len(pieces[i]) > limit:
            pieces[i] = _shorten(_Text(string, None, len(_utf_8(string)), _utf_8), limit, _escape)
    return b"".join(pieces)


def _limit(sizes: list[int], room: int) -> int:
    """Return the largest size at which strings of these *sizes*, ascending, are together within *room*."""
    for i, size in enumerate(sizes):
        each = room // (len(sizes) - i)
        if size > each:
            return each
        room -= size
    return max(sizes, default=0)


def _wrap(text: _Text, budget: int) -> bytes:
    """Return the JSON object that stands for a document which could not be cut as one."""
    opening = b'{"truncated":{"original_bytes":%d},"text":"' % text.total
    closing = b'"}'
    # Broken bytes become question marks.
    return opening + _shorten(text, budget - len(opening) - len(closing), partial(_escape, errors="replace")) + closing
