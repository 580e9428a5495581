"""Numbers and times as people read them."""

from __future__ import annotations

import datetime


def duration(seconds: float) -> str:
    """Seconds in the two units that matter: "<1 ms", "12 ms", "1.2 s", "40 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 and whole < 600 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def age(seconds: float) -> str:
    """How long ago, in one unit: the list is read for what is new."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(at: float) -> str:
    """A time of day in UTC, to the millisecond."""
    return _utc(at).strftime("%H:%M:%S.") + f"{_utc(at).microsecond // 1000:03}"


def day(at: float) -> str:
    """A date and a time in UTC."""
    return _utc(at).strftime("%Y-%m-%d %H:%M:%S UTC")


def minute(at: float) -> str:
    """Hours and minutes in UTC."""
    return _utc(at).strftime("%H:%M")


def iso(at: float) -> str:
    """For machines: `<time datetime>`."""
    return _utc(at).isoformat(timespec="milliseconds")


def _utc(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
