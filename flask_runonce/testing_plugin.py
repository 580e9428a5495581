"""The kit's fixtures, for pytest to find by itself (entry point `pytest11`).

Every pytest run in an environment that has this package imports this file. So it stands outside of `testing`, and
imports that, and WebTest with it, only where a fixture is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .stores import MemoryStore

if TYPE_CHECKING:
    from .testing import Clock, RunOnceTestApp


@pytest.fixture
def runonce_clock() -> Clock:
    """A timer that stands still until the test moves it."""
    from .testing import Clock

    return Clock()


@pytest.fixture
def runonce_store(runonce_clock: Clock) -> MemoryStore:
    """An empty store that goes by `runonce_clock`."""
    return MemoryStore(timer=runonce_clock)


@pytest.fixture
def runonce_testapp(app: Any) -> RunOnceTestApp:
    """A `RunOnceTestApp` for what the project's own fixture `app` gives."""
    from .testing import RunOnceTestApp

    return RunOnceTestApp(app)
