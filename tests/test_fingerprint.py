"""The request body: read ahead within its bounds, never past its end, and left to the handler (CONTRACT section 4)."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flask_runonce.fingerprint import Input, fingerprint

# The same examples each time, however slow the machine.
steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LIMIT = 8
LINES = b"one\ntwo\n\nthree"


class Connection:
    """A server's input: a socket that a client has sent `body` on and holds open, so that reading past it would hang.

    At most `piece` bytes come at a time. `end`, where the client has gone, is what a read at the end gives or raises.
    """

    def __init__(self, body: bytes, *, piece: int = 10**6, end: bytes | OSError | None = None) -> None:
        self._body = io.BytesIO(body)
        self._length = len(body)
        self._piece = piece
        self._end = end
        self.asked: list[int] = []

    @property
    def left(self) -> int:
        return self._length - self._body.tell()

    def read(self, size: int = -1) -> bytes:
        return self._body.read(self._granted(size)) or self._ended()

    def readline(self, size: int = -1) -> bytes:
        return self._body.readline(self._granted(size)) or self._ended()

    def readlines(self, hint: int = -1) -> list[bytes]:
        raise AssertionError("would hang: the lines of a socket have no end")

    def __iter__(self) -> Any:
        raise AssertionError("would hang: the lines of a socket have no end")

    def _granted(self, size: int) -> int:
        self.asked.append(size)
        if self._end is None:
            assert 0 <= size <= self.left, f"would hang: {size} bytes wanted, {self.left} there"
            return min(size, self._piece)
        return self._piece if size < 0 else min(size, self._piece)

    def _ended(self) -> bytes:
        if isinstance(self._end, OSError):
            raise self._end
        return self._end or b""


def environ_of(body: Connection, length: int | str | None, **more: Any) -> dict[str, Any]:
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/act", "wsgi.input": body, **more}
    return environ if length is None else {**environ, "CONTENT_LENGTH": str(length)}


def input_of(body: bytes, limit: int = LIMIT, **options: Any) -> tuple[Input, Connection]:
    """The input of a request that says its length, and the connection that it comes from."""
    connection = Connection(body, **options)
    return Input.of(environ_of(connection, len(body)), limit), connection


def chunked(body: bytes, *, terminated: bool = True, **options: Any) -> tuple[Input, Connection]:
    """The input of a request with chunked framing; the server says where the input ends, or does not."""
    connection = Connection(body, end=b"", **options)
    environ = environ_of(connection, None, HTTP_TRANSFER_ENCODING="chunked")
    return Input.of({**environ, "wsgi.input_terminated": True} if terminated else environ, LIMIT), connection


# Reading

READS: dict[str, Callable[[Any], bytes]] = {
    "read()": lambda stream: stream.read(),
    "read(-1)": lambda stream: stream.read(-1),
    "read(None)": lambda stream: stream.read(None),
    "read past the end": lambda stream: stream.read(10**9),
    "read by fives": lambda stream: b"".join(iter(lambda: stream.read(5), b"")),
    "readline()": lambda stream: b"".join(iter(stream.readline, b"")),
    "readline(None)": lambda stream: b"".join(iter(lambda: stream.readline(None), b"")),
    "readline by twos": lambda stream: b"".join(iter(lambda: stream.readline(2), b"")),
    "readline past the end": lambda stream: b"".join(iter(lambda: stream.readline(10**9), b"")),
    "readlines()": lambda stream: b"".join(stream.readlines()),
    "readlines(None)": lambda stream: b"".join(stream.readlines(None)),
    "iteration": lambda stream: b"".join(stream),
    "a read, then iteration": lambda stream: stream.read(2) + b"".join(stream),
    "a line, then a read": lambda stream: stream.readline() + stream.read(),
}

each_read = pytest.mark.parametrize("read", READS.values(), ids=READS)


@each_read
@pytest.mark.parametrize("limit", [0, len(LINES) - 1, len(LINES), 10**6])
def test_a_body_is_read_to_its_length_and_not_past_it(read: Callable[[Any], bytes], limit: int) -> None:
    found, connection = input_of(LINES, limit)
    assert read(found) == LINES
    assert (found.read(), found.readline(), found.readlines(), list(found)) == (b"", b"", [], [])
    assert connection.left == 0


@each_read
def test_what_follows_a_body_on_its_connection_is_left_there(read: Callable[[Any], bytes]) -> None:
    for limit in (0, 10**6):
        connection = Connection(LINES + b"POST /next")
        assert read(Input.of(environ_of(connection, len(LINES)), limit)) == LINES
        assert connection.left == len(b"POST /next")


@each_read
def test_a_chunked_body_is_read_to_where_the_server_says(read: Callable[[Any], bytes]) -> None:
    assert read(chunked(LINES)[0]) == LINES


NO_LENGTH = {"no length": None, "not a number": "many", "a negative number": "-5", "nothing": "", "zero": "0"}


@pytest.mark.parametrize("length", NO_LENGTH.values(), ids=NO_LENGTH)
@each_read
def test_without_a_length_nothing_is_read(length: str | None, read: Callable[[Any], bytes]) -> None:
    connection = Connection(LINES)
    found = Input.of(environ_of(connection, length), LIMIT)
    assert found.fetch()
    assert read(found) == b""
    found.drain()
    assert connection.asked == []


def test_a_chunked_body_whose_end_the_server_does_not_tell_is_not_read() -> None:
    found, connection = chunked(LINES, terminated=False)
    assert (found.fetch(), found.read()) == (True, b"")
    assert connection.asked == []


sizes = st.none() | st.integers(-1, 12)
operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "readline", "readlines"]), sizes),
        st.tuples(st.sampled_from(["fetch", "aside"]), st.none()),
    ),
    max_size=12,
)


@given(st.text("ab\n", max_size=20).map(str.encode), st.integers(0, 20), st.integers(1, 20), operations)
@example(b"ab\nab", 5, 2, [("read", 3), ("aside", None), ("readlines", 1), ("fetch", None), ("read", None)])
@steady
def test_it_is_read_like_a_file(body: bytes, limit: int, piece: int, todo: list[tuple[str, int | None]]) -> None:
    """Whatever is done, in whatever order: one that fits is like a file; one that does not may come in pieces."""
    fits = len(body) <= limit
    found, connection = input_of(body, limit, piece=piece if fits else 10**6)
    model = io.BytesIO(body)
    for name, size in todo:
        if name == "fetch":
            assert found.fetch()
        elif name == "aside":
            if fits:
                assert found.aside(lambda _: found.read(), {}) == body
        else:
            assert getattr(found, name)(size) == getattr(model, name)(size)
    assert found.read() == model.read()
    assert connection.left == 0


# Reading ahead


def test_a_body_of_exactly_the_bound_is_read_ahead() -> None:
    found, connection = input_of(b"x" * LIMIT)
    assert found.fetch()
    assert found.fingerprinted == b"x" * LIMIT
    assert connection.left == 0
    assert found.read() == b"x" * LIMIT


def test_a_body_one_byte_over_the_bound_is_left_on_its_connection() -> None:
    found, connection = input_of(b"x" * (LIMIT + 1))
    assert found.fetch()
    assert found.fingerprinted is None
    assert connection.asked == []
    assert found.read() == b"x" * (LIMIT + 1)


def test_a_chunked_body_is_left_on_its_connection() -> None:
    found, connection = chunked(b"x")
    assert found.fetch()
    assert found.fingerprinted is None
    assert connection.asked == []


def test_an_empty_body_is_complete() -> None:
    found, connection = input_of(b"")
    assert found.fetch()
    assert found.fingerprinted == b""
    assert connection.asked == []


def test_a_bound_of_nothing_lets_only_an_empty_body_in() -> None:
    assert [(found.fetch(), found.fingerprinted) for found, _ in (input_of(b"", 0), input_of(b"x", 0))] == [
        (True, b""),
        (True, None),
    ]


def test_a_body_that_comes_in_pieces_is_complete() -> None:
    found, _ = input_of(b"12345678", piece=3)
    assert found.fetch()
    assert found.fingerprinted == b"12345678"


@pytest.mark.parametrize("before", [0, 1, 5, LIMIT])
def test_what_was_read_before_belongs_to_the_fingerprint(before: int) -> None:
    found, _ = input_of(b"12345678")
    assert found.read(before) == b"12345678"[:before]
    assert found.fetch()
    assert found.fingerprinted == b"12345678"
    assert found.read() == b"12345678"[before:]


@pytest.mark.parametrize("end", [b"", ConnectionResetError(), TimeoutError()], ids=["end", "reset", "time-out"])
@pytest.mark.parametrize("came", [0, 1, LIMIT - 1])
def test_a_body_that_is_cut_off_is_incomplete(came: int, end: bytes | OSError) -> None:
    found = Input.of(environ_of(Connection(b"x" * came, end=end), LIMIT), LIMIT)
    assert not found.fetch()
    assert not found.fetch()
    assert found.read() == b"x" * came


def test_a_body_over_the_bound_that_is_cut_off_is_the_handlers_to_find_out() -> None:
    found = Input.of(environ_of(Connection(b"x" * LIMIT, end=b""), LIMIT + 1), LIMIT)
    assert found.fetch()
    assert (found.read(), found.read()) == (b"x" * LIMIT, b"")


MULTIPART = {
    "multipart/form-data; boundary=a": True,
    "Multipart/Mixed": True,
    " multipart/related": True,
    "": False,
    "application/json": False,
    "multiparty/form-data": False,
    "text/plain; multipart/form-data": False,
}


@pytest.mark.parametrize(("content_type", "left_out"), MULTIPART.items(), ids=MULTIPART)
def test_a_multipart_body_is_no_part_of_the_fingerprint(content_type: str, left_out: bool) -> None:
    found = Input.of(environ_of(Connection(b"x"), 1, CONTENT_TYPE=content_type), LIMIT)
    assert found.fetch()
    assert found.fingerprinted == (None if left_out else b"x")
    assert found.read() == b"x"


def test_a_multipart_body_that_is_cut_off_is_incomplete() -> None:
    environ = environ_of(Connection(b"x", end=b""), 2, CONTENT_TYPE="multipart/form-data; boundary=a")
    assert not Input.of(environ, LIMIT).fetch()


# Reading aside


def test_a_look_aside_sees_the_whole_body_and_takes_nothing() -> None:
    found, _ = input_of(b"12345678")
    assert found.read(3) == b"123"
    assert found.aside(lambda _: found.read(), {}) == b"12345678"
    assert found.aside(lambda _: found.read(5), {}) == b"12345"
    assert found.read() == b"45678"


def test_a_look_aside_that_raises_takes_nothing() -> None:
    found, _ = input_of(b"12345678")

    def look() -> None:
        found.read(5)
        raise LookupError

    with pytest.raises(LookupError):
        found.aside(lambda _: look(), {})
    assert found.read() == b"12345678"


@pytest.mark.parametrize("make", [lambda: input_of(b"x" * 9), lambda: chunked(b"x" * 9)], ids=["over", "chunked"])
@each_read
def test_a_look_aside_cannot_touch_a_body_that_is_not_kept(
    make: Callable[[], tuple[Input, Connection]], read: Callable[[Any], bytes]
) -> None:
    found, connection = make()
    with pytest.raises(RuntimeError, match="RUNONCE_FINGERPRINT_BYTES"):
        found.aside(lambda _: read(found), {})
    assert connection.asked == []
    assert found.read() == b"x" * 9


def test_a_look_aside_that_does_not_touch_a_body_needs_none() -> None:
    found, _ = input_of(b"x" * 9)
    assert found.aside(lambda _: "by the path", {}) == "by the path"


# Draining


@pytest.mark.parametrize("read_before", [0, 5])
@pytest.mark.parametrize("size", [LIMIT + 1, 200_000])
def test_what_the_handler_left_is_drained_in_pieces(size: int, read_before: int) -> None:
    found, connection = input_of(b"x" * size)
    found.read(read_before)
    found.drain()
    assert connection.left == 0
    assert max(connection.asked) <= 64 * 1024
    assert found.read() == b""


def test_a_chunked_body_is_drained() -> None:
    found, connection = chunked(b"x" * 200_000, piece=50_000)
    found.drain()
    assert connection.left == 0
    assert max(connection.asked) <= 64 * 1024


def test_a_body_within_the_bound_is_drained_from_its_connection_and_kept() -> None:
    found, connection = input_of(b"12345678")
    found.drain()
    assert connection.left == 0
    assert found.aside(lambda _: found.read(), {}) == b"12345678"


def test_draining_takes_nothing_from_a_handler_that_shares_the_body() -> None:
    found, _ = input_of(b"12345678")
    found.fetch()
    found.drain()
    assert found.read() == b"12345678"


@pytest.mark.parametrize("end", [b"", ConnectionResetError()], ids=["end", "reset"])
def test_draining_ends_with_a_connection_that_ends(end: bytes | OSError) -> None:
    found = Input.of(environ_of(Connection(b"x" * 9, end=end), 20), LIMIT)
    found.drain()
    found.drain()
    assert found.read() == b""


# Its place in the environ


def test_it_takes_the_inputs_place_once() -> None:
    environ = environ_of(Connection(b"12345678"), LIMIT)
    found = Input.of(environ, LIMIT)
    assert environ["wsgi.input"] is found
    assert found.read(3) == b"123"
    assert Input.of(environ, LIMIT) is found
    assert found.read() == b"45678"


def test_webob_is_told_that_it_cannot_rewind_it() -> None:
    environ = environ_of(Connection(b""), 0, **{"webob.is_body_seekable": True})
    Input.of(environ, LIMIT)
    assert environ["webob.is_body_seekable"] is False


# The fingerprint

PARTS = {"REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": "/act", "QUERY_STRING": "a=1"}
OTHERS = {
    "method": ({"REQUEST_METHOD": "PUT"}, b"body"),
    "path": ({"PATH_INFO": "/act/"}, b"body"),
    "mount": ({"SCRIPT_NAME": "/v2"}, b"body"),
    "query string": ({"QUERY_STRING": "a=2"}, b"body"),
    "no query string": ({"QUERY_STRING": ""}, b"body"),
    "body": ({}, b"Body"),
    "no body": ({}, None),
    "what moves from path to query": ({"PATH_INFO": "/acta", "QUERY_STRING": "=1"}, b"body"),
    "what moves from query to body": ({"QUERY_STRING": "a="}, b"1body"),
    "what moves from body to query": ({"QUERY_STRING": "a=1b"}, b"ody"),
}


@pytest.mark.parametrize(("changed", "body"), OTHERS.values(), ids=OTHERS)
def test_another_input_has_another_fingerprint(changed: dict[str, str], body: bytes | None) -> None:
    assert fingerprint({**PARTS, **changed}, body) != fingerprint(PARTS, b"body")


SAME = {
    "another header": {"HTTP_X_ATTEMPT": "2"},
    "another content type": {"CONTENT_TYPE": "text/plain"},
    "another host": {"HTTP_HOST": "b.example", "SERVER_NAME": "b", "REMOTE_ADDR": "10.0.0.2"},
    "mounted elsewhere under the same path": {"SCRIPT_NAME": "/act", "PATH_INFO": ""},
}


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_the_same_input_has_the_same_fingerprint(changed: dict[str, str]) -> None:
    assert fingerprint({**PARTS, **changed}, b"body") == fingerprint(PARTS, b"body")


def test_a_fingerprint_is_the_same_in_every_release() -> None:
    digest = "7866b78a19b1d7dd540c51fd39d9db48984f72851263dabdd5b4c70d1f3f7356"  # of 4:POST4:/act3:a=1body
    assert fingerprint(PARTS, b"body") == digest


def test_a_server_need_not_give_the_parts_that_are_empty() -> None:
    needed = {"REQUEST_METHOD": "POST"}
    empty = {"SCRIPT_NAME": "", "PATH_INFO": "", "QUERY_STRING": ""}
    assert fingerprint(needed, None) == fingerprint({**needed, **empty}, None)


parts = st.tuples(st.sampled_from(["POST", "PUT"]), st.text("/a1:", max_size=4), st.text("a1:", max_size=4))


@given(parts, st.binary(max_size=3), parts, st.binary(max_size=3))
@steady
def test_only_equal_inputs_have_equal_fingerprints(
    one: tuple[str, str, str], body: bytes, other: tuple[str, str, str], other_body: bytes
) -> None:
    names = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING")
    digests = {
        fingerprint(dict(zip(names, one, strict=True)), body),
        fingerprint(dict(zip(names, other, strict=True)), other_body),
    }
    assert len(digests) == (1 if (one, body) == (other, other_body) else 2)
    assert all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in digests)
