"""Fixtures for the tests of `flask_runonce.contrib`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blinker import ANY

from flask_runonce import signals


@pytest.fixture
def all_apps() -> Iterator[None]:
    """For a test that listens to all apps of the process: afterwards nobody does."""
    yield
    for name in dir(signals):
        if name.startswith(("call_", "result_")):
            signal = getattr(signals, name)
            for receiver in list(signal.receivers_for(ANY)):
                signal.disconnect(receiver)
