"""For tests of apps that run calls once, and of stores (extra `testing`: WebTest and pytest)."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.store_contract")  # so that its failures show what was compared

from .app import RunOnceTestApp  # noqa: E402
from .clock import Clock  # noqa: E402
from .runs_once import assert_runs_once  # noqa: E402
from .store_contract import OwnClockContract, SharedStoreContract, StoreContract  # noqa: E402

__all__ = [
    "Clock",
    "OwnClockContract",
    "RunOnceTestApp",
    "SharedStoreContract",
    "StoreContract",
    "assert_runs_once",
]
