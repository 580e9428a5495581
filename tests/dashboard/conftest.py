"""The browser tests are asked for by their marker: `pytest tests/dashboard -m browser`. Others run everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from webtest import TestApp

from .site import Site


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs Debian's chromium; run only where -m names it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "browser" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("browser")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.let_go.set()
    site.store.close()


@pytest.fixture
def person(site: Site) -> TestApp:
    """Who looks at the dashboard."""
    return TestApp(site.app)
