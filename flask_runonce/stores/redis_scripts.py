"""What runs inside Redis, each script as one step and each on one key, so that in a cluster the keys may lie apart.

The record is a hash: its `version`; its `lease`, until when ("" without one); `repeats`, a count; when it was `created`
and `finished`; what `codec.encode` made of it, `facts` and `body`; and of the facts, for renewals, `run` (only while it
runs) and `canceled`. Times are Unix seconds.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Script(NamedTuple):
    """A script and the name under which Redis knows it once it has seen it."""

    text: str
    sha: str


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_CLOCK = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local function stamp(seconds) return string.format('%.6f', seconds) end
local function milliseconds(seconds) return math.ceil(1000 * seconds) end
"""

_LOOK = (
    _CLOCK
    + """
local there = redis.call('HMGET', KEYS[1], 'version', 'lease', 'repeats', 'created', 'finished', 'facts', 'body')
if not there[1] and redis.call('EXISTS', KEYS[1]) == 1 then return redis.error_reply('WRONGTYPE not a record') end
"""
)

READ = _script(
    _LOOK
    + """
if there[7] and ARGV[1] == 'facts' then there[7] = '' end
return {stamp(now), 0, unpack(there)}
"""
)
"""A record, with its body or (`facts`) without. Answers the time, 0, and the record's seven fields or nils."""

# A full Redis refuses a script's first write if that may need memory. Where a record is there, the first write is one
# that needs none, so that repeats, cancels and the ends of runs go on; only new calls are refused.
SWAP = _script(
    _LOOK
    + """
local seen, version, if_lost, repeated, forget, lease, run, canceled, created, finished, facts, body = unpack(ARGV)
local current = there[1] or ''
if current ~= '' and current == version then  -- put by an attempt whose reply was lost on the way
    return {stamp(now), 1, unpack(there, 1, 5)}
end
local lease_until = tonumber(there[2] or '')
local left = math.max((lease_until or now) - now, 0)
if current == seen and (if_lost == '0' or lease_until and left == 0) then
    if current ~= '' then
        redis.call('PERSIST', KEYS[1])
        redis.pcall('PUBLISH', KEYS[1], version)  -- forbidden to this user, it costs the waiters a poll
    end
    if version == '' then
        redis.call('DEL', KEYS[1])
        return {stamp(now), 1}
    end
    local repeats = there[3] or '0'
    if lease == 'same' then
        lease_until = there[2]
    else
        left = tonumber(lease) or 0
        lease_until = lease ~= '' and stamp(now + lease) or ''
    end
    if created == 'now' then created = stamp(now) end
    if finished == 'now' then finished = stamp(now) end
    redis.call('HSET', KEYS[1], 'version', version, 'lease', lease_until, 'repeats', repeats, 'created', created,
        'finished', finished, 'run', run, 'canceled', canceled, 'facts', facts, 'body', body)
    redis.call('PEXPIRE', KEYS[1], milliseconds(forget + left))
    return {stamp(now), 1, version, lease_until, repeats, created, finished}
end
if current ~= '' then
    redis.call('PEXPIRE', KEYS[1], milliseconds(forget + left))
    if repeated == '1' then there[3] = redis.call('HINCRBY', KEYS[1], 'repeats', 1) end
end
return {stamp(now), 0, unpack(there)}
"""
)
"""The store's swap. A `version` of "" drops the record.

Answers the time, 1 and the first five fields of the record that was put, or the time, 0 and what is there, as READ.
"""

RENEW = _script(
    _CLOCK
    + """
local run, forget, lease = unpack(ARGV)
local there = redis.call('HMGET', KEYS[1], 'run', 'canceled')
if there[1] ~= run then return 'lost' end
redis.call('PEXPIRE', KEYS[1], milliseconds(forget + lease))
redis.call('HSET', KEYS[1], 'lease', stamp(now + lease))
return there[2]
"""
)
"""A fresh lease for a run. Answers "lost", or the record's `canceled`."""

NOTE = _script(
    _CLOCK
    + """
local digest, idle = unpack(ARGV)
local forgotten = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 4)
if #forgotten > 0 then redis.call('ZREM', KEYS[1], unpack(forgotten)) end
redis.call('ZADD', KEYS[1], 'GT', now + idle, digest)
if redis.call('PTTL', KEYS[1]) < 1000 * idle then redis.call('PEXPIRE', KEYS[1], milliseconds(idle)) end
"""
)
"""Note on a chat's list that a call will be there for `idle` seconds more, and take a few forgotten ones off it."""

TEXTS = {script.sha: script.text for script in (READ, SWAP, RENEW, NOTE)}
