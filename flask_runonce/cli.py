"""`flask runonce list|show|cancel|forget|stats`: for the person who decides what a program cannot (CONTRACT section 8).

Exit codes: 0 done; 1 the call is not known, its run goes on, a cancel hook raised, or the store is in memory; 2 wrong
usage; 3 the store cannot answer.
"""

from __future__ import annotations

import collections
import datetime
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
from flask.cli import AppGroup

from . import keys, routes
from .blueprint import service_of_app
from .errors import InvalidKey, StoreError
from .record import CallKey, Seen
from .rule import Do
from .runner import Runner

F = TypeVar("F", bound=Callable[..., Any])

_PAGE = 200
_COLUMNS = (
    "scope",
    "chat_id",
    "id",
    "state",
    "canceled",
    "status",
    "outcome",
    "repeats",
    "started_at",
    "finished_at",
    "owner",
)

group = AppGroup("runonce", help="Look at the calls of a shared store, cancel and forget them.")


def _on_shared_store(command: F) -> F:
    """Give the command the app's runner, and turn what goes wrong into a message and an exit code."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        runner = service_of_app().runner
        if not runner.store.shared:
            raise click.ClickException("The memory store is inside the server's process; there is nothing to see here.")
        try:
            command(runner, **options)
        except StoreError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(3) from error

    return run  # type: ignore[return-value]


def _checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The one form of an ID or scope that was given."""
    try:
        if value is None:
            return None
        if parameter.name == "scope":
            return keys.canonical_scope(value)
        return keys.canonical_id(value, "chat ID" if parameter.name == "chat_id" else "tool call ID")
    except (InvalidKey, ValueError) as error:
        raise click.BadParameter(str(error)) from error


def _names_one(command: F) -> F:
    command = click.argument("tool_call_id", callback=_checked)(command)
    command = click.option("--chat", "chat_id", required=True, callback=_checked, help="The chat ID.")(command)
    what = "The scope, where the app gives one."
    return click.option("--scope", default="", callback=_checked, help=what)(command)


def _filters(command: F) -> F:
    command = click.option("--chat", "chat_id", callback=_checked, help="Only this chat's calls.")(command)
    return click.option("--scope", callback=_checked, help="Only this scope's calls.")(command)


_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document, for scripts.")


def _facts(seen: Seen) -> dict[str, Any]:
    assert seen.record
    key = seen.record.key
    lost = {"state": "lost"} if seen.lost else {}
    outcome = {"outcome": seen.record.outcome and seen.record.outcome.value}
    owner = {"owner": seen.record.owner}
    return {"scope": key.scope, "chat_id": key.chat_id, **routes.describe(seen), **lost, **outcome, **owner}


def _all(runner: Runner, scope: str | None, chat_id: str | None) -> Iterator[Seen]:
    offset = 0
    while rows := runner.list(scope, chat_id, limit=_PAGE, offset=offset).rows:
        yield from rows
        offset += len(rows)


@group.command("list")
@_filters
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10**6), help="How many, newest first.")
@_as_json
@_on_shared_store
def list_(runner: Runner, scope: str | None, chat_id: str | None, limit: int, as_json: bool) -> None:
    """List calls, newest first. A run whose owner died shows as "lost"."""
    page = runner.list(scope, chat_id, limit=limit, offset=0)
    rows = [_facts(seen) for seen in page.rows]
    if as_json:
        click.echo(json.dumps({"tool_calls": rows, "total": page.total}))
        return
    _table(rows)
    click.echo(f"{len(rows)} of {page.total} calls")


@group.command("show")
@_names_one
@_as_json
@_on_shared_store
def show(runner: Runner, scope: str, chat_id: str, tool_call_id: str, as_json: bool) -> None:
    """Show one call."""
    seen = runner.find(CallKey(scope, chat_id, tool_call_id))
    if seen.record is None:
        raise click.ClickException("No record of this tool call is kept.")
    facts = _facts(seen)
    click.echo(json.dumps(facts) if as_json else "\n".join(f"{name:12} {_cell(name, facts[name])}" for name in facts))


@group.command("cancel")
@_names_one
@_on_shared_store
def cancel(runner: Runner, scope: str, chat_id: str, tool_call_id: str) -> None:
    """Cancel a call, as the cancel route does."""
    key = CallKey(scope, chat_id, tool_call_id)
    try:
        canceled = runner.cancel(key)
    except StoreError:
        raise
    except Exception as error:
        raise click.ClickException(f"Canceled, but a cancel hook raised: {error!r}") from error
    if canceled.pending:
        raise click.ClickException("Canceled, but its run still goes on. Cancel again to learn what became of it.")
    click.echo(f"Canceled. The call was found {canceled.found.value.replace('_', ' ')}.")


@group.command("forget")
@_names_one
@_on_shared_store
def forget(runner: Runner, scope: str, chat_id: str, tool_call_id: str) -> None:
    """Forget a call: sent again, it RUNS again. Refused while the owner of its run is alive."""
    done = runner.forget(CallKey(scope, chat_id, tool_call_id))
    if done is Do.REFUSE:
        raise click.ClickException("The call is running and its owner is alive.")
    if done is Do.GONE:
        raise click.ClickException("No record of this tool call is kept.")
    click.echo("Forgotten. The call will run if it is sent again.")


@group.command("stats")
@_filters
@_as_json
@_on_shared_store
def stats(runner: Runner, scope: str | None, chat_id: str | None, as_json: bool) -> None:
    """Count the kept calls by state."""
    counts = collections.Counter(_facts(seen)["state"] for seen in _all(runner, scope, chat_id))
    facts = {state: counts[state] for state in ("running", "lost", "done", "canceled")}
    facts["total"] = counts.total()
    click.echo(json.dumps(facts) if as_json else "\n".join(f"{name:9} {count}" for name, count in facts.items()))


def _table(rows: list[dict[str, Any]]) -> None:
    cells = [list(_COLUMNS), *([_cell(name, row[name]) for name in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_at"):
        return datetime.datetime.fromtimestamp(value, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
    return str(value)
