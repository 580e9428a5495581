"""Which module may know which, held over the imports as they are written; and what the package shows of itself."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flask_runonce
from flask_runonce import stores

ROOT = Path(flask_runonce.__file__).parent

LAYERS = [
    {"errors", "record", "process", "budget", "fingerprint"},
    {"rule", "codec", "keys", "signals", "call", "problems", "stores.protocol"},
    {"settings", "capture", "stores.memory", "stores.sql", "stores.statements", "stores.database", "stores.engines"},
    {"stores.redis", "stores.redis_scripts", "keeper"},
    {"stores"},
    {"runner"},
    {"service"},
    {"routes"},
    {"wsgi", "blueprint"},
    {"cli"},
    {"extension"},
    {"flask_runonce"},
]
"""Each module imports from the layers before its own, or from its neighbours in `stores`."""

STORES = {name for layer in LAYERS for name in layer if name.split(".")[0] == "stores"}
FLASK = {"blueprint", "cli", "extension"}
DRIVERS = {
    "sqlalchemy": {"stores.sql", "stores.statements", "stores.database", "stores.engines"},
    "redis": {"stores.redis"},
    "httpx": set[str](),
    "flask": FLASK,
    "click": {"cli"},
    "cachetools": {"stores.memory"},
}
"""Who may import what is somebody else's, within the core."""


def _is_around(name: str) -> bool:
    """The client, and what is built on the core for tests and for other tools. The core knows none of them."""
    return name.split(".")[0] in ("client", "contrib") or name.startswith("testing")


def _modules() -> dict[str, ast.Module]:
    """Every module of the package by its name in it; the package itself has its own name."""
    modules = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name or "flask_runonce"] = ast.parse(path.read_text("utf-8"), str(path))
    return modules


MODULES = _modules()
CORE = {name for name in MODULES if not _is_around(name)}


def _package_of(name: str) -> list[str]:
    if name == "flask_runonce":
        return []
    return name.split(".") if (ROOT / name.replace(".", "/")).is_dir() else name.split(".")[:-1]


def _ours(dotted: str) -> set[str]:
    """The module that an import of `dotted` is about: it, or the one that it is a name in."""
    if dotted in MODULES:
        return {dotted}
    parent = dotted.rpartition(".")[0]
    return {parent or "flask_runonce"}


def _nodes(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _nodes(node, types=types)


def imports(name: str, *, types: bool = True) -> tuple[set[str], set[str]]:
    """What a module imports, also in functions: of ours, and the top names of what is not. `types`: also for those."""
    ours, others = set[str](), set[str]()
    for node in _nodes(MODULES[name], types=types):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flask_runonce":
                    ours |= _ours(alias.name.removeprefix("flask_runonce").lstrip(".") or "flask_runonce")
                else:
                    others.add(alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = _package_of(name)
                start = package[: len(package) - node.level + 1]
            elif module.split(".")[0] == "flask_runonce":
                start, module = [], module.removeprefix("flask_runonce").lstrip(".")
            else:
                others.add(module.split(".")[0])
                continue
            for alias in node.names:
                ours |= _ours(".".join(filter(None, [*start, module, alias.name])))
    return ours - {name}, others


OURS = {name: imports(name)[0] for name in MODULES}
OTHERS = {name: imports(name)[1] for name in MODULES}


def _layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


# The arrows


def test_the_imports_are_read_as_they_are_written() -> None:
    """What the other tests rest on."""
    assert OURS["rule"] == {"record"}
    assert OURS["wsgi"] >= {"routes", "service", "stores", "call"}
    assert OURS["signals"] == {"record"}
    assert OURS["stores"] >= {"stores.memory", "stores.sql", "stores.redis", "errors"}
    assert OURS["client"] >= {"client.core", "client.errors"}
    assert {"flask", "contextlib"} <= OTHERS["extension"]


def test_every_module_of_the_core_has_its_place() -> None:
    assert set.union(*LAYERS) == CORE
    assert sum(map(len, LAYERS)) == len(CORE)


@pytest.mark.parametrize("name", sorted(CORE))
def test_arrows_point_one_way(name: str) -> None:
    neighbours = STORES if name in STORES else set[str]()
    wrong = {other for other in OURS[name] - neighbours if _is_around(other) or _layer_of(other) >= _layer_of(name)}
    assert wrong == set()


def test_nothing_goes_in_circles() -> None:
    graphlib.TopologicalSorter({name: imports(name, types=False)[0] for name in MODULES}).prepare()


@pytest.mark.parametrize("name", ["errors", "record", "process", "budget", "fingerprint"])
def test_the_ground_floor_imports_nothing_of_ours(name: str) -> None:
    assert OURS[name] == set()


def test_the_rule_imports_the_record_and_neither_clock_nor_io() -> None:
    assert OURS["rule"] == {"record"}
    assert OTHERS["rule"] <= {"__future__", "enum", "typing"}


def test_the_record_is_data() -> None:
    assert OTHERS["record"] <= {"__future__", "enum", "typing", "hashlib"}


@pytest.mark.parametrize("name", sorted(STORES))
def test_stores_know_records_and_not_what_becomes_of_them(name: str) -> None:
    assert OURS[name] - STORES <= {"record", "codec", "errors", "process"}


def test_the_runner_alone_sees_both_the_rule_and_a_store() -> None:
    see_the_rule = {name for name in CORE if "rule" in OURS[name]}
    see_a_store = {name for name in CORE if OURS[name] & STORES}
    assert see_the_rule & see_a_store == {"runner"}
    assert see_the_rule == {"runner", "cli"}


def test_the_runner_knows_stores_by_their_protocol_alone() -> None:
    for name in ("runner", "keeper"):
        assert OURS[name] & STORES == {"stores.protocol"}


def test_nothing_imports_the_extension_but_the_package() -> None:
    assert {name for name in CORE if "extension" in OURS[name]} == {"flask_runonce"}


@pytest.mark.parametrize("other", DRIVERS)
def test_a_driver_is_known_where_it_is_needed(other: str) -> None:
    assert {name for name in CORE if other in OTHERS[name]} <= DRIVERS[other]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split(".")[0] == "client"))
def test_the_client_knows_nothing_of_the_server_side(name: str) -> None:
    assert all(other.split(".")[0] == "client" for other in OURS[name])
    assert not OTHERS[name] & {"flask", "werkzeug", "blinker", "cachetools", "sqlalchemy", "redis"}


# What is shown


def test_the_names_of_the_package() -> None:
    assert flask_runonce.__all__ == sorted(flask_runonce.__all__)
    assert set(flask_runonce.__all__) == {
        "CallKey",
        "RunOnce",
        "RunOnceMiddleware",
        "SavedResponse",
        "budget_for",
        "current_call",
        "errors",
        "signals",
    }
    assert all(hasattr(flask_runonce, name) for name in flask_runonce.__all__)


def test_the_names_of_the_stores() -> None:
    assert set(stores.__all__) == {
        "MemoryStore",
        "Page",
        "RedisStore",
        "Renewed",
        "SQLStore",
        "Store",
        "Swapped",
        "open_store",
    }
    assert all(hasattr(stores, name) for name in stores.__all__)
    with pytest.raises(AttributeError, match="MongoStore"):
        stores.MongoStore  # noqa: B018


@pytest.mark.parametrize("name", ["keys", "errors", "signals", "client"])
def test_the_modules_that_the_contract_names(name: str) -> None:
    importlib.import_module(f"flask_runonce.{name}")


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()


# What an import costs


def _python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


EXTRAS = {"sqlalchemy", "redis", "httpx", "stamina", "tenacity", "pytest", "webtest", "hypothesis"}
EXTRAS |= {"prometheus_client", "opentelemetry"}
IMPORT = f"""
import sys
import flask_runonce
from flask_runonce import RunOnceMiddleware, keys, stores
RunOnceMiddleware(lambda environ, start_response: [], guard=bool)
print(sorted({EXTRAS!r} & set(sys.modules)))
"""


def test_an_import_needs_no_extra() -> None:
    assert _python(IMPORT) == "[]"


LOCKS = """
import threading
import flask, cachetools  # their own locks are not ours
made = []

def watched(name):
    make = getattr(threading, name)

    def wrapper(*args, **options):
        import sys
        if "flask_runonce" in sys._getframe(1).f_code.co_filename:
            made.append(name)
        return make(*args, **options)

    return wrapper

for name in ("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Thread", "local"):
    setattr(threading, name, watched(name))

from flask_runonce import RunOnce, RunOnceMiddleware
middleware = RunOnceMiddleware(lambda environ, start_response: [], guard=bool)
RunOnce(flask.Flask("app"), guard=bool)
print(made)
list(middleware({"REQUEST_METHOD": "GET", "PATH_INFO": "/api/v0/tool-calls", "HTTP_CODER_CHAT_ID": "chat-1",
                 "wsgi.input": None}, lambda *head: None))
print("Lock" in made)
"""


def test_no_lock_and_no_thread_is_made_before_the_first_request() -> None:
    """A lock that is made at import is a native one in a worker that gevent patches later."""
    assert _python(LOCKS).splitlines() == ["[]", "True"]
