"""Where records are kept: in memory, in an SQL database, in Redis. `open_store` makes the one that a URI names.

The SQL and Redis stores import their drivers when they are first named, so the package needs neither extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .memory import MemoryStore
from .protocol import Page, Renewed, Store, Swapped

if TYPE_CHECKING:
    from .redis import RedisStore
    from .sql import SQLStore

__all__ = ["MemoryStore", "Page", "RedisStore", "Renewed", "SQLStore", "Store", "Swapped", "open_store"]

_EXTRAS = {"SQLStore": "sql", "RedisStore": "redis"}
"""Where each store stands, and which extra it needs."""


def __getattr__(name: str) -> Any:
    if name not in _EXTRAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra = _EXTRAS[name]
    try:
        return getattr(importlib.import_module(f".{extra}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'flask-runonce[{extra}]'") from error


def open_store(uri: str, *, prefix: str = "runonce", max_bytes: int = 256 * 2**20) -> Store:
    """Make the store that `uri` names: `memory://`, `redis://…`, `rediss://…`, `unix://…`, or an SQLAlchemy URL.

    `prefix` starts every key and table name of a shared store; `max_bytes` bounds the memory store. Nothing is opened
    yet. Raises `ConfigError` for a URI that names no store, ImportError when the store's extra is not installed.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise ConfigError("RUNONCE_STORE_URI", f"is not a store's URI: {uri!r}")
    if scheme == "memory":
        if uri != "memory://":
            raise ConfigError("RUNONCE_STORE_URI", f"must be memory:// with nothing after it, not {uri!r}")
        return MemoryStore(max_bytes=max_bytes)
    store: Store = __getattr__("RedisStore" if scheme in ("redis", "rediss", "unix") else "SQLStore")(
        uri, prefix=prefix
    )
    return store
