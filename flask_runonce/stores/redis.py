"""The store of several machines: Redis 6.2 or later, or Valkey (extra `redis`).

    prefix:{digest}        a record, one hash; also the channel on which its changes are told
    prefix:chat:{digest}   what a scope and chat has, for `list`: a sorted set of digests by the end of their idle time
    prefix:since           set with the first record; what has gone of its time to live is the store's age

Every key has a time to live, so Redis itself forgets. Every time is Redis's own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE
from redis.connection import parse_url
from redis.exceptions import ChildDeadlockedError, NoScriptError, RedisClusterException, RedisError
from redis.retry import Retry

from ..codec import decode, encode
from ..errors import ConfigError, StoreFull, StoreUnavailable, UnreadableRecord
from ..process import PerProcess
from ..record import NOW, CallKey, Claim, Record, Seen, State
from .protocol import Page, Renewed, Swapped
from .redis_scripts import NOTE, READ, RENEW, SWAP, TEXTS

logger = logging.getLogger("flask_runonce")

_TIMEOUT = 2.0
"""Seconds that a server may take to accept a connection, or to answer. A URL may say otherwise: `?socket_timeout=5`."""
_POLL = 1.0
"""Seconds after which a waiter looks again although it heard nothing."""
_ERA = 10 * 365 * 86400
"""The time to live that `prefix:since` starts with, in seconds: the store's age is what has gone of it."""

_ERRORS = (RedisError, RedisClusterException, ChildDeadlockedError, OSError)
_Command: TypeAlias = tuple[Any, ...]


class RedisStore:
    """Keeps records in Redis, for any number of processes and machines.

    `url_or_client` is a URL (`redis://`, `rediss://`, `unix://`), or a `redis.Redis` or `redis.RedisCluster` of the
    app's own, whose time-outs, retries and bound on connections then hold; each call that waits takes a connection.
    `prefix` starts every key and channel. Raises `ConfigError` for a URL that is none.
    """

    shared = True

    def __init__(self, url_or_client: str | redis.Redis | redis.RedisCluster, *, prefix: str = "runonce") -> None:
        self._prefix = prefix
        self._first = iter((True,))  # gives True once, to one thread
        self._owned = isinstance(url_or_client, str)
        self._client: PerProcess[redis.Redis | redis.RedisCluster]
        if isinstance(url_or_client, str):
            try:
                parse_url(url_or_client)  # type: ignore[no-untyped-call]
            except ValueError as error:
                raise ConfigError("RUNONCE_STORE_URI", f"is not a Redis URL: {error}") from error
            self._client = PerProcess(lambda: _client(url_or_client))
        else:
            self._client = PerProcess(lambda: url_or_client)

    def read(self, key: CallKey) -> Seen:
        (reply,) = self._run(_look(self._name(key.digest)))
        return _seen(_checked(reply))

    def swap(
        self,
        key: CallKey,
        seen: str,
        new: Record | None,
        *,
        forget_after: float,
        lease: float | None,
        if_lost: bool = False,
        repeat: bool = False,
    ) -> Swapped:
        digest = key.digest
        version = "" if new is None else secrets.token_hex(8)
        swap = ("EVALSHA", SWAP.sha, 1, self._name(digest), seen, version, int(if_lost), int(repeat), forget_after)
        commands: list[_Command] = [(*swap, *_arguments(new, lease))]
        if new is not None:
            commands.append(self._note(key, digest, forget_after + (lease or 0)))
        if not seen:
            commands.append(("SET", f"{self._prefix}:since", 1, "EX", _ERA, "NX"))
        reply = _checked(self._run(*commands)[0])
        if not reply[1]:
            return Swapped(False, _seen(reply))
        if new is None:
            return Swapped(True, Seen(None, "", float(reply[0])))
        return Swapped(True, _seen(reply, new))

    def renew(self, claims: Sequence[Claim], *, forget_after: float, lease: float) -> Renewed:
        commands: list[_Command] = []
        for claim in claims:
            digest = claim.key.digest
            commands.append(("EVALSHA", RENEW.sha, 1, self._name(digest), claim.run, forget_after, lease))
            commands.append(self._note(claim.key, digest, forget_after + lease))
        answers = dict(zip((claim.run for claim in claims), map(_checked, self._run(*commands)[::2]), strict=True))
        return Renewed(
            canceled=frozenset(run for run, answer in answers.items() if answer == b"1"),
            lost=frozenset(run for run, answer in answers.items() if answer == b"lost"),
        )

    def wait(self, key: CallKey, version: str, timeout: float) -> Seen:
        left = timeout
        deadline = time.monotonic() + timeout
        with _unavailable(), self._client().pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(self._name(key.digest))
            while True:
                # The first message says that we are subscribed: no change after the first look goes unheard.
                pubsub.get_message(timeout=max(0.0, min(left, _POLL)))
                seen = self.read(key)
                left = deadline - time.monotonic()
                if seen.version != version or left <= 0:
                    return seen

    def list(self, *, scope: str | None = None, chat_id: str | None = None, limit: int = 50, offset: int = 0) -> Page:
        """As every store, but the bodies of the records are left out."""
        replies = self._run(*(_look(name, "facts") for name in self._names(scope, chat_id)))
        found = []
        for seen in map(_seen, map(_checked, replies)):
            if (record := seen.record) is None:
                continue  # forgotten, and still on its chat's list
            if scope in (None, record.key.scope) and chat_id in (None, record.key.chat_id):
                found.append((record.created_at, record.key, seen))
        found.sort(reverse=True)
        return Page([seen for _, _, seen in found[offset : offset + limit]], len(found))

    def purge(self) -> int:
        """Nothing to do: Redis drops what has had its time."""
        return 0

    def age(self) -> float:
        (left,) = map(_checked, self._run(("PTTL", f"{self._prefix}:since")))
        return max(0.0, _ERA - left / 1000) if left >= 0 else 0.0

    def close(self) -> None:
        """Close the connections, unless the client is the app's own."""
        if self._owned and (client := self._client.made):
            client.close()

    def _name(self, digest: str) -> str:
        return f"{self._prefix}:{{{digest}}}"

    def _chat(self, scope: str, chat_id: str) -> str:
        return f"{self._prefix}:chat:{{{CallKey(scope, chat_id, '').digest}}}"

    def _note(self, key: CallKey, digest: str, idle: float) -> _Command:
        return ("EVALSHA", NOTE.sha, 1, self._chat(key.scope, key.chat_id), digest, idle)

    def _names(self, scope: str | None, chat_id: str | None) -> Sequence[str]:
        """Where the records of a scope and chat are: on the chat's list, else wherever in Redis."""
        if scope is not None and chat_id is not None:
            (digests,) = map(_checked, self._run(("ZRANGE", self._chat(scope, chat_id), 0, -1)))
            return [self._name(digest.decode()) for digest in digests]
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix) + ":{*}"
        with _unavailable():
            names = set(self._client().scan_iter(match=pattern, count=1000))
        return [name if isinstance(name, str) else name.decode() for name in names]

    def _run(self, *commands: _Command) -> Sequence[Any]:
        """The replies to `commands`, sent together: bytes, whatever the client decodes, and errors among them."""
        client = self._client()
        with _unavailable():
            replies = _send(client, commands)
            if unknown := [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
                # Sent in full, a script is run and also known from then on.
                in_full = [("EVAL", TEXTS[commands[n][1]], *commands[n][2:]) for n in unknown]
                for n, reply in zip(unknown, _send(client, in_full), strict=True):
                    replies[n] = reply
        if next(self._first, False):
            _warn_if_evicting(client)
        return replies


def _client(url: str) -> redis.Redis:
    """A client that gives up within seconds. A broken connection is tried once more; a silent server is not."""
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=_TIMEOUT,
        socket_timeout=_TIMEOUT,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        max_connections=2**31 - 1,
    )


def _send(client: redis.Redis | redis.RedisCluster, commands: Iterable[_Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command, **{NEVER_DECODE: True})
        return pipeline.execute(raise_on_error=False)


def _look(name: str, what: str = "all") -> _Command:
    return ("EVALSHA", READ.sha, 1, name, what)


def _arguments(new: Record | None, lease: float | None) -> Sequence[Any]:
    """What the script puts: lease, run, canceled, created, finished, facts, body."""
    if new is None:
        return [""] * 7
    running = new.state is State.RUNNING
    times = ("" if at is None else "now" if at == NOW else repr(at) for at in (new.created_at, new.finished_at))
    lasts = "" if not running else "same" if lease is None else lease
    return (lasts, new.run if running else "", int(bool(new.found)), *times, *encode(new))


def _seen(reply: Sequence[Any], put: Record | None = None) -> Seen:
    """What a script's answer says is there: the record `put`, or the one that the answer carries."""
    now, _, version, lease, repeats, created, finished, *stored = reply
    if version is None:
        return Seen(None, "", float(now))
    try:
        created_at, finished_at = float(created), float(finished) if finished else None
        if put:
            record = put._replace(created_at=created_at, finished_at=finished_at)
        else:
            record = decode(*stored, created_at=created_at, finished_at=finished_at)
        return Seen(record, version.decode(), float(now), float(lease) if lease else None, int(repeats))
    except (TypeError, ValueError) as error:
        raise UnreadableRecord(f"A stored record cannot be read: {error}") from error


def _checked(reply: Any) -> Any:
    if not isinstance(reply, Exception):
        return reply
    if "used memory > 'maxmemory'" in str(reply):
        raise StoreFull("Redis has no memory left for another record.") from reply
    if "WRONGTYPE" in str(reply):
        raise UnreadableRecord("What Redis holds under a call's key is not a record.") from reply
    raise StoreUnavailable(f"Redis did not do it: {reply}") from reply


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise StoreUnavailable(f"Redis cannot be reached: {error}") from error


def _warn_if_evicting(client: redis.Redis | redis.RedisCluster) -> None:
    with contextlib.suppress(*_ERRORS):
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            logger.warning(
                "Redis may evict records: its maxmemory-policy is %s. A call whose record is gone may run again; "
                "set it to noeviction, or give flask-runonce a Redis of its own.",
                policy,
            )
