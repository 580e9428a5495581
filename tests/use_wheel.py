"""Uses the installed package as a user would who has no extra: run by tox's `wheel`, away from the sources."""

import sys
from pathlib import Path

import flask
from werkzeug.test import Client

import flask_runonce
from flask_runonce import CallKey, RunOnce, RunOnceMiddleware, SavedResponse, current_call, errors, signals
from flask_runonce.stores import MemoryStore, open_store

package = Path(flask_runonce.__file__).parent
assert package.parent.name == "site-packages", package
assert (package / "py.typed").is_file()
assert not {"sqlalchemy", "redis", "httpx", "pytest", "webtest"} & set(sys.modules)
assert all((CallKey, RunOnceMiddleware, SavedResponse, errors, signals, MemoryStore, open_store)) and not current_call

app = flask.Flask(__name__)
runonce = RunOnce(app)
runs = []


@app.post("/")
@runonce.once
def run() -> str:
    runs.append(1)
    return "ran"


client = Client(app)
headers = {"Coder-Chat-Id": "chat", "Coder-Tool-Call-Id": "call"}
first, repeat = (client.post("/", headers=headers) for _ in range(2))
assert first.text == repeat.text == "ran" and repeat.headers["Idempotent-Replayed"] == "true" and len(runs) == 1
for uri, extra in (("sqlite:///runonce.db", "sql"), ("redis://localhost", "redis")):
    try:
        open_store(uri)
    except ImportError as error:
        assert f"pip install 'flask-runonce[{extra}]'" in str(error), error
    else:
        raise AssertionError(uri)
print("The wheel works without any extra.")
