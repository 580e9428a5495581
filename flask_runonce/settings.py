"""The configuration table of CONTRACT section 3, as one frozen value that checks itself."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Collection, Mapping
from typing import Any

from . import keys
from .errors import ConfigError

METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""The methods that act (CONTRACT section 4)."""

MIDDLEWARE_RELEASE_STATUSES = frozenset({401, 407, 425, 429})
"""Answers by which an app's own guards say "not processed"; the middleware stands outside of them."""

MIN_LEASE = 0.05
"""Seconds: a lease that cannot be renewed in time would take the living for lost."""

_AT_MOST = f"at most {threading.TIMEOUT_MAX:.0f} seconds"
_PREFIX = "RUNONCE_"
_TOKEN = re.compile(r"[!#$%&'*+.^`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2, without "_": WSGI cannot tell it from "-"
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")  # RFC 3986, section 3.3: what stands in a URL as it is
_KEY_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One field for each `RUNONCE_…` key. Times are seconds, sizes bytes."""

    store_uri: str = "memory://"
    chat_id_header: str = keys.CHAT_ID_HEADER
    tool_call_id_header: str = keys.TOOL_CALL_ID_HEADER
    url_prefix: str | None = "/api/v0/tool-calls"
    forget_after: float = 3600
    wait_timeout: float = 25
    cancel_timeout: float = 25
    max_waiting: int = 16
    lease: float = 30
    max_body_bytes: int = 8 * 2**20
    max_store_bytes: int = 256 * 2**20
    fingerprint_bytes: int = 2**20
    release_statuses: Collection[int] = frozenset()
    required: bool = False
    on_lost: str = "refuse"
    result_budget: int | None = None
    key_prefix: str = "runonce"
    allow_unshared: bool = False

    @classmethod
    def load(cls, config: Mapping[str, Any], **defaults: Any) -> Settings:
        """The settings that `config` names, over `defaults`. Keys that do not start with `RUNONCE_` are not ours.

        Raises `ConfigError`, which names the key, for an unknown one and for a value that makes no sense.
        """
        fields = {_PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        values = dict(defaults)
        for key, value in config.items():
            if not isinstance(key, str) or not key.startswith(_PREFIX):
                continue
            if key not in fields:
                raise ConfigError(key, f"is no setting of flask-runonce; there are {', '.join(sorted(fields))}")
            values[fields[key]] = value
        return cls(**values)

    def __post_init__(self) -> None:
        self._check("store_uri", isinstance(self.store_uri, str) and "://" in self.store_uri, "a store's URI")
        for name in ("chat_id_header", "tool_call_id_header"):
            value = getattr(self, name)
            self._check(name, isinstance(value, str) and _TOKEN.fullmatch(value), "the name of a header")
            owned = isinstance(value, str) and value.lower() in ("content-type", "content-length")
            self._check(name, not owned, "a header that HTTP has no other use for")
        same = self.chat_id_header.lower() == self.tool_call_id_header.lower()
        self._check("tool_call_id_header", not same, "another header than RUNONCE_CHAT_ID_HEADER")
        is_path = isinstance(self.url_prefix, str) and _PATH.fullmatch(self.url_prefix)
        wanted = 'None or a path like "/runs", of characters that a URL has as they are'
        self._check("url_prefix", self.url_prefix is None or is_path, wanted)
        self._check("forget_after", _is_time(self.forget_after) and self.forget_after > 0, f"more than 0, {_AT_MOST}")
        self._check("lease", _is_time(self.lease) and self.lease >= MIN_LEASE, f"from {MIN_LEASE}, {_AT_MOST}")
        for name in ("wait_timeout", "cancel_timeout"):
            self._check(name, _is_time(getattr(self, name)), f"from 0, {_AT_MOST}")
        for name in ("max_waiting", "max_body_bytes", "fingerprint_bytes"):
            self._check(name, _is_count(getattr(self, name)), "a whole number from 0")
        self._check(
            "max_store_bytes", _is_count(self.max_store_bytes) and self.max_store_bytes, "a whole number from 1"
        )
        self._check("release_statuses", _are_statuses(self.release_statuses), "a collection of status codes")
        object.__setattr__(self, "release_statuses", frozenset(self.release_statuses))
        for name in ("required", "allow_unshared"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("on_lost", self.on_lost in ("refuse", "rerun"), '"refuse" or "rerun"')
        self._check(
            "result_budget",
            self.result_budget is None or (_is_count(self.result_budget) and self.result_budget >= 64),
            "None or a number of bytes from 64",
        )
        key_prefix_fits = isinstance(self.key_prefix, str) and _KEY_PREFIX.fullmatch(self.key_prefix)
        self._check("key_prefix", key_prefix_fits, "a letter, then letters, digits or _, at most 40 in all")

    def _check(self, name: str, holds: object, wanted: str) -> None:
        if not holds:
            raise ConfigError(_PREFIX + name.upper(), f"must be {wanted}, not {getattr(self, name)!r}")


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= threading.TIMEOUT_MAX


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_statuses(value: object) -> bool:
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        return False
    return all(_is_count(status) and 100 <= status <= 599 for status in value)
