"""Search and replace in a text, as language models write it: nearly right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    old_text: str
    new_text: str
    replace_all: bool = False


class EditError(Exception):
    """The edit does not fit the text; the message says why, for a language model."""


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """``text`` after all edits, one after the other. Raises EditError, which names the edit by its number."""
    if not edits:
        raise EditError("at least one edit is required.")
    for number, edit in enumerate(edits, start=1):
        try:
            text = _apply(text, edit)
        except EditError as error:
            raise EditError(f"edit {number} of {len(edits)}: {error}") from None
    return text


def unified_diff(path: str, before: str, after: str) -> str:
    """What changed, in the form that ``diff -u`` and ``patch`` use."""
    lines = difflib.unified_diff(_lines(before), _lines(after), path, path)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _apply(text: str, edit: Edit) -> str:
    if not edit.old_text:
        raise EditError("the text to search for is empty.")
    for find in (_exact, _ignoring_trailing_blanks, _ignoring_surrounding_blanks):
        spans = list(find(text, edit.old_text))
        if len(spans) > 1 and not edit.replace_all:
            raise EditError(
                f"the text to search for was found {len(spans)} times. "
                "Give more context so that it is found once, or set replace_all."
            )
        if spans:
            return _replace(text, spans, edit.new_text)
    raise EditError("the text to search for was not found. Read the file again and copy the text as it stands there.")


def _replace(text: str, spans: list[tuple[int, int]], new_text: str) -> str:
    pieces, end_of_last = [], 0
    for start, end in spans:
        pieces += [text[end_of_last:start], new_text]
        end_of_last = end
    return "".join([*pieces, text[end_of_last:]])


def _exact(text: str, search: str) -> Iterator[tuple[int, int]]:
    start = text.find(search)
    while start >= 0:
        yield start, start + len(search)
        start = text.find(search, start + len(search))


def _ignoring_trailing_blanks(text: str, search: str) -> Iterator[tuple[int, int]]:
    return _whole_lines(text, search, str.rstrip)


def _ignoring_surrounding_blanks(text: str, search: str) -> Iterator[tuple[int, int]]:
    return _whole_lines(text, search, str.strip)


def _whole_lines(text: str, search: str, normal: Callable[[str], str]) -> Iterator[tuple[int, int]]:
    """Where the lines of ``search`` occur, compared in their ``normal`` form. Blanks alone match nothing."""
    if not search.strip():
        return
    wanted = [normal(line) for line in _lines(search)]
    lines = _lines(text)
    found = [normal(line) for line in lines]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    at = 0
    while at <= len(lines) - len(wanted):
        if found[at : at + len(wanted)] != wanted:
            at += 1
            continue
        start, at = starts[at], at + len(wanted)
        end = starts[at]
        if not search.endswith("\n"):
            # The search ends within its last line, so that line's end stays where it is.
            last = lines[at - 1]
            end -= len(last) - len(last.rstrip("\r\n"))
        yield start, end


def _lines(text: str) -> list[str]:
    """The lines with their ends. Only a line feed ends one (``str.splitlines`` knows ten more)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
