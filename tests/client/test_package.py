import ast
from pathlib import Path

import flask_runonce.client


def test_the_front_door():
    assert sorted(flask_runonce.client.__all__) == [
        "AsyncToolClient",
        "CallInfo",
        "Cancellation",
        "NoAnswer",
        "Refused",
        "Retry",
        "SilenceTimeout",
        "Stopped",
        "ToolCallError",
        "ToolClient",
        "error_detail",
        "tool_call_id",
        "tool_call_ids",
    ]
    assert all(hasattr(flask_runonce.client, name) for name in flask_runonce.client.__all__)


def test_the_client_uses_no_store_and_no_app():
    files = list(Path(flask_runonce.client.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, file
                names = [] if node.level else [node.module]
            assert not any(name.partition(".")[0] in ("flask", "flask_runonce", "werkzeug") for name in names), file
