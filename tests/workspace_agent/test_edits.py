from __future__ import annotations

import pytest

from examples.workspace_agent.edits import Edit, EditError, apply_edits, unified_diff


def test_exact_within_a_line() -> None:
    assert apply_edits("one two three\n", [Edit("two", "2")]) == "one 2 three\n"


def test_edits_build_on_each_other() -> None:
    assert apply_edits("a\n", [Edit("a", "b"), Edit("b", "c")]) == "c\n"


def test_exact_wins_over_a_looser_match() -> None:
    assert apply_edits("a  \nb\na\nb\n", [Edit("a\nb\n", "x\n")]) == "a  \nb\nx\n"


def test_trailing_blanks_are_ignored() -> None:
    assert apply_edits("if x:  \n    y\t\nz\n", [Edit("if x:\n    y\n", "pass\n")]) == "pass\nz\n"


def test_trailing_blanks_of_the_search_are_ignored() -> None:
    assert apply_edits("a\nb\nc\n", [Edit("a \nb ", "x")]) == "x\nc\n"


def test_trailing_blanks_win_over_surrounding_ones() -> None:
    assert apply_edits("  a\nb\n---\na \nb\n", [Edit("a\nb \n", "x\n")]) == "  a\nb\n---\nx\n"


def test_surrounding_blanks_are_ignored() -> None:
    assert apply_edits("{\n\tone;\n\ttwo;\n}\n", [Edit("one;\n  two;\n", "\tthree;\n")]) == "{\n\tthree;\n}\n"


def test_windows_line_ends_are_trailing_blanks() -> None:
    assert apply_edits("a\r\nb\r\nc\r\n", [Edit("a\nb", "x")]) == "x\r\nc\r\n"


def test_the_last_line_may_have_no_end() -> None:
    assert apply_edits("a\n  b", [Edit("a\nb", "x")]) == "x"


@pytest.mark.parametrize("search", ["a", " a \n"])
def test_replace_all(search: str) -> None:
    end = "\n" if search.endswith("\n") else ""
    assert apply_edits("a\nb\na\n", [Edit(search, "x" + end, replace_all=True)]) == "x\nb\nx\n"


def test_matches_do_not_overlap() -> None:
    assert apply_edits("aaa", [Edit("aa", "b", replace_all=True)]) == "ba"
    assert apply_edits(" a\n a\n a\n", [Edit("a\na\n", "b\n", replace_all=True)]) == "b\n a\n"


@pytest.mark.parametrize(("search", "times"), [("a", 3), (" a \n", 3)])
def test_several_matches_are_counted_and_refused(search: str, times: int) -> None:
    with pytest.raises(EditError, match=rf"edit 2 of 2: .*found {times} times.*more context"):
        apply_edits("a\na\na\n--\n", [Edit("--", "=="), Edit(search, "b")])


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([], "at least one edit"),
        ([Edit("", "x")], "edit 1 of 1: the text to search for is empty"),
        ([Edit("missing", "x")], "edit 1 of 1: .*not found"),
        ([Edit(" \n", "x")], "not found"),
        ([Edit("a\nb\nc\nd\ne\nf", "x")], "not found"),
    ],
)
def test_what_does_not_fit_is_refused(edits: list[Edit], says: str) -> None:
    with pytest.raises(EditError, match=says):
        apply_edits("a\nb\nc\n\n\n", edits)


def test_the_diff_is_one_that_patch_reads() -> None:
    assert unified_diff("/w/f", "a\nb\n", "a\nc") == (
        "--- /w/f\n+++ /w/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n"
    )


def test_only_a_line_feed_ends_a_line_of_the_diff() -> None:
    assert unified_diff("f", "a\x0cb\n", "a\x0cc\n").endswith("@@ -1 +1 @@\n-a\x0cb\n+a\x0cc\n")
