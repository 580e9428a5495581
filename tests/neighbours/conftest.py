"""The fixtures of the tests of docs/neighbours.md. Each module tests the section that its `SECTION` names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from webtest import TestApp

PAGE = Path(__file__).parents[2] / "docs" / "neighbours.md"


def sections() -> dict[str, list[str]]:
    """The Python blocks of the page by the heading they stand under, with their lines' numbers as in the page."""
    found: dict[str, list[str]] = {}
    tokens = MarkdownIt("commonmark").parse(PAGE.read_text("utf-8"))
    for token, inline in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open" and token.tag == "h2":
            found[inline.content] = blocks = []
        elif token.type == "fence" and token.info == "python":
            assert token.map
            blocks.append("\n" * (token.map[0] + 1) + token.content)
    return found


@pytest.fixture
def names(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the first block of the section has defined. Its files are in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    defined: dict[str, Any] = {"__name__": "docs_" + re.sub(r"\W", "_", request.module.SECTION.lower())}
    exec(compile(sections()[request.module.SECTION][0], str(PAGE), "exec", dont_inherit=True), defined)
    yield defined


@pytest.fixture
def service(names: dict[str, Any]) -> TestApp:
    """The section's app, served."""
    return TestApp(names["app"])
