"""The page as a whole: each section has its tests, and says what needs an order."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from .conftest import PAGE, sections


def test_each_section_has_a_module_that_tests_it() -> None:
    modules = [path.stem for path in Path(__file__).parent.glob("test_*.py") if path.stem != Path(__file__).stem]
    tested = [importlib.import_module(f"tests.neighbours.{module}").SECTION for module in modules]
    assert sorted(tested) == sorted(sections())


def test_each_flask_section_says_what_needs_an_order() -> None:
    for name, text in re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        assert bool(sections()[name]) == ("\n**Order:** " in text), name
