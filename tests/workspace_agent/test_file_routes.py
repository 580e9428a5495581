from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webtest import TestRequest

Agent = Any


def replacing(path: Path | str, old: str, new: str, **options: Any) -> dict[str, Any]:
    return {"path": str(path), "edits": [{"old_text": old, "new_text": new, **options}]}


# Write


def test_a_repeated_write_writes_once_and_answers_the_same(agent: Agent, root: Path) -> None:
    file = root / "folder/file"
    first = agent.write(file, b"\x00\xffdata")
    assert first.json == {"message": f'Successfully wrote to "{file}"'}
    assert file.read_bytes() == b"\x00\xffdata"
    file.write_bytes(b"changed since")
    again = agent.write(file, b"\x00\xffdata")
    assert again.body == first.body and again.headers["Idempotent-Replayed"] == "true"
    assert file.read_bytes() == b"changed since"


def test_a_write_without_a_tool_call_id_acts_each_time(agent: Agent, root: Path) -> None:
    agent.write(root / "file", b"one", None)
    agent.write(root / "file", b"two", None)
    assert (root / "file").read_bytes() == b"two"


def test_a_body_beyond_the_fingerprint_is_written_whole(agent: Agent, root: Path) -> None:
    data = os.urandom(3_000_000)
    for _ in range(2):
        agent.write(root / "file", data)
    assert (root / "file").read_bytes() == data


@pytest.mark.parametrize(
    ("path", "status"), [("relative", 400), ("", 400), ("{root}", 400), ("/outside", 403), ("{root}/../x", 403)]
)
def test_a_write_that_is_refused(agent: Agent, root: Path, path: str, status: int) -> None:
    assert agent.write(path.format(root=root), b"x", status=status).json["message"]
    assert os.listdir(root) == []


def test_a_write_needs_a_path(agent: Agent) -> None:
    agent.send("POST", "/api/v0/write-file", call="call-1", body=b"x", status=400)


def test_a_symlink_out_of_the_root_is_refused(agent: Agent, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("old")
    (root / "link").symlink_to(tmp_path / "secret")
    assert "outside" in agent.write(root / "link", b"x", status=403).json["message"]
    assert "outside" in agent.edit(replacing(root / "link", "old", "x"), call="call-2", status=403).json["message"]
    assert (tmp_path / "secret").read_text() == "old"


@pytest.mark.parametrize("call", [{}, {"Coder-Tool-Call-Id": "call-1"}])
@pytest.mark.parametrize("bound", [4, 1024])
def test_a_cut_off_upload_changes_nothing_and_may_come_again(
    make_agent: Callable[..., Agent], root: Path, bound: int, call: dict[str, str]
) -> None:
    """Whether or not the library has read the body ahead for its fingerprint."""
    agent = make_agent(config={"RUNONCE_FINGERPRINT_BYTES": bound})
    (root / "file").write_text("old")
    headers = {"Coder-Chat-Id": "chat-1", **call}
    path = f"/api/v0/write-file?path={root}/file"
    cut_off = TestRequest.blank(path, method="POST", headers=headers, body=b"half of")
    cut_off.environ["CONTENT_LENGTH"] = "11"
    agent.do_request(cut_off, status=400)
    assert (root / "file").read_text() == "old" and os.listdir(root) == ["file"]
    agent.write(root / "file", b"half of it!")
    assert (root / "file").read_text() == "half of it!"


# Edit


def test_a_repeated_edit_edits_once_and_answers_the_same(agent: Agent, root: Path) -> None:
    file = root / "file"
    file.write_text("a\n")
    first = agent.edit(replacing(file, "a", "aa"))
    assert first.json == {}
    again = agent.edit(replacing(file, "a", "aa"))
    assert again.body == first.body and again.headers["Idempotent-Replayed"] == "true"
    assert file.read_text() == "aa\n"


def test_an_edit_answers_the_diff_when_asked(agent: Agent, root: Path) -> None:
    (root / "one").write_text("a\nb\n")
    (root / "two").write_bytes(b"\xff a a\n")
    answer = agent.edit(
        replacing(root / "one", "b", "c"),
        replacing(root / "two", "a", "b", replace_all=True),
        fields={"include_diff": True},
    )
    one, two = answer.json["files"]
    assert one == {"path": f"{root}/one", "diff": f"--- {root}/one\n+++ {root}/one\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"}
    assert two["diff"].endswith("-\ufffd a a\n+\ufffd b b\n")
    assert (root / "two").read_bytes() == b"\xff b b\n"


def test_errors_of_all_files_come_together_and_nothing_is_written(agent: Agent, root: Path) -> None:
    for name in ("good", "bad"):
        (root / name).write_text("a a")
    answer = agent.edit(
        replacing(root / "good", "a a", "b"),
        replacing(root / "bad", "a", "b"),
        replacing("worse", "a", "b"),
        status=400,
    )
    assert "2 times" in answer.json["message"] and '"worse"' in answer.json["message"]
    assert (root / "good").read_text() == "a a"


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b"{}",
        b'{"files": []}',
        b'{"files": {}}',
        b'{"files": ["x"]}',
        b'{"files": [{"path": "/x", "edits": ["y"]}]}',
        b'{"files": [{"path": "/x", "edits": [{"old_text": 1}]}]}',
        b'{"files": [{}]}',
    ],
)
def test_an_edit_that_makes_no_sense(agent: Agent, body: bytes) -> None:
    assert agent.send("POST", "/api/v0/edit-files", call="call-1", body=body, status=400).json["message"]
