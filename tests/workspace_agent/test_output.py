from __future__ import annotations

import pytest

from examples.workspace_agent.output import HEAD_BYTES, TAIL_BYTES, OutputBuffer

BOTH = HEAD_BYTES + TAIL_BYTES


def written(*pieces: bytes) -> OutputBuffer:
    buffer = OutputBuffer()
    for piece in pieces:
        buffer.write(piece)
    return buffer


def test_nothing_written() -> None:
    assert written().read(ended=True) == ("", 0, 0)


def test_up_to_the_bound_all_is_kept() -> None:
    text = "a" * HEAD_BYTES + "b" * TAIL_BYTES
    assert written(text.encode()).read(ended=True) == (text, BOTH, 0)


@pytest.mark.parametrize("piece", [1, 1000, 10 * BOTH])
def test_beyond_the_bound_head_and_tail_are_kept(piece: int) -> None:
    data = b"a" * HEAD_BYTES + b"x" * 5000 + b"b" * TAIL_BYTES
    output = written(*(data[at : at + piece] for at in range(0, len(data), piece))).read(ended=True)
    assert output.text == "a" * HEAD_BYTES + "\n... [omitted 5000 bytes] ...\n" + "b" * TAIL_BYTES
    assert output.original_bytes == BOTH + 5000
    assert output.omitted_bytes == 5000


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", ["é", "€", "🙂"])
def test_cuts_keep_whole_characters(character: str, shift: int) -> None:
    data = b"." * shift + (character * 20_000).encode()
    output = written(data).read(ended=True)
    head, marker, tail = output.text.split("\n")
    assert set(head) <= {".", character} and set(tail) == {character}
    assert marker == f"... [omitted {output.omitted_bytes} bytes] ..."
    assert output.original_bytes == len(data)
    assert len(head.encode()) + len(tail.encode()) + output.omitted_bytes == len(data)
    assert HEAD_BYTES - 3 <= len(head.encode()) <= HEAD_BYTES
    assert TAIL_BYTES - 3 <= len(tail.encode()) <= TAIL_BYTES


def test_a_character_across_the_middle_of_a_whole_output_is_kept() -> None:
    text = "a" * (HEAD_BYTES - 1) + "€" * 10
    assert written(text.encode()).read(ended=True).text == text


def test_a_character_still_being_written_is_held_back_until_it_is_whole() -> None:
    start, rest = "ab€".encode()[:-1], "€".encode()[-1:]
    buffer = written(start)
    assert buffer.read(ended=False) == ("ab", 2, 0)
    buffer.write(rest)
    assert buffer.read(ended=False) == ("ab€", 5, 0)


def test_a_character_that_was_never_finished_shows() -> None:
    assert written("ab€".encode()[:-1]).read(ended=True).text == "ab\ufffd"


def test_binary_output_becomes_text_and_its_numbers_add_up() -> None:
    data = bytes(range(256)) * 1024
    output = written(data).read(ended=True)
    assert "\ufffd" in output.text
    assert BOTH - 6 <= len(data) - output.omitted_bytes <= BOTH


def test_continuation_bytes_alone_are_cut_by_three_at_most() -> None:
    output = written(b"\x80" * (BOTH + 100)).read(ended=True)
    assert output.omitted_bytes == 103
