"""A workspace agent: runs the commands and writes the files that a chat's tool calls ask for, each call once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flask import Flask

from flask_runonce import RunOnce

from .file_routes import add_file_routes
from .files import Workspace
from .process_routes import add_process_routes
from .processes import Chat, ProcessTable
from .wire import agent_blueprint

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment


class WorkspaceAgent:
    """What an app has running: ``app.extensions["workspace_agent"]``."""

    def __init__(self, root: str | None) -> None:
        self.workspace = Workspace(root)
        self.processes = ProcessTable()
        atexit.register(self.close)

    def close(self) -> None:
        """Kill every process with its whole group and wait for them. May be called again."""
        self.processes.close()
        atexit.unregister(self.close)


def create_app(
    root: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    guard: Callable[[WSGIEnvironment], object] | None = None,
    scope: Callable[[WSGIEnvironment], str | None] | None = None,
) -> Flask:
    """The agent as a Flask app.

    ``root`` is the folder that paths must lie in and where commands start (None: the whole file system, and the home
    folder); ``config`` goes to ``app.config``. ``guard`` and ``scope`` are those of ``RunOnce`` and hold for the
    agent's own routes too: a guard refuses by raising an ``HTTPException``, a scope keeps the chats of tenants apart.
    """
    app = Flask(__name__)
    app.config.from_mapping(config)
    runonce = RunOnce(app, guard=guard, scope=scope)
    agent = WorkspaceAgent(None if root is None else os.fspath(root))
    app.extensions["workspace_agent"] = agent

    @runonce.on_cancel
    def stop(call: Any) -> None:
        """Kill what the call started. The library calls it for every cancel, also for one that came before the call."""
        agent.processes.cancel(Chat(call.key.scope, call.key.chat_id), call.key.tool_call_id)

    routes = agent_blueprint(guard, scope)
    add_process_routes(routes, agent.processes, agent.workspace, runonce)
    add_file_routes(routes, agent.workspace, runonce)
    app.register_blueprint(routes, url_prefix="/api/v0")
    return app
