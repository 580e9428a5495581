from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.workspace_agent.edits import Edit
from examples.workspace_agent.errors import AgentError
from examples.workspace_agent.files import FileEdits, Workspace


@pytest.fixture
def workspace(root: Path) -> Workspace:
    return Workspace(str(root))


def refused(call: object, *args: object) -> AgentError:
    with pytest.raises(AgentError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


def replacing(path: Path, old: str, new: str) -> FileEdits:
    return FileEdits(str(path), [Edit(old, new)])


# Paths


@pytest.mark.parametrize("path", ["", "file", "./file", "../file"])
def test_a_relative_path_is_refused(workspace: Workspace, path: str) -> None:
    assert refused(workspace.resolve, path).status == 400


@pytest.mark.parametrize("path", ["{root}/../x", "{root}x", "/etc/passwd", "/", "{root}/a/../../x"])
def test_a_path_outside_the_root_is_refused(workspace: Workspace, root: Path, path: str) -> None:
    assert refused(workspace.resolve, path.format(root=root)).status == 403


def test_a_path_inside_is_resolved(workspace: Workspace, root: Path) -> None:
    assert workspace.resolve(f"{root}/a/../b//c") == f"{root}/b/c"


def test_a_symlink_that_leads_out_is_refused(workspace: Workspace, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old")
    (root / "file").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    (root / "dangling").symlink_to(tmp_path / "new")
    for path in (root / "file", root / "folder" / "secret", root / "dangling", root / "folder" / "deep" / "new"):
        assert refused(workspace.write, str(path), [b"x"]).status == 403
        assert refused(workspace.edit, [replacing(path, "old", "new")]).status == 403
    assert sorted(os.listdir(tmp_path)) == ["root", "secret"]
    assert secret.read_text() == "old"


def test_a_root_that_is_itself_a_symlink(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    Workspace(str(link)).write(str(link / "file"), [b"x"])
    assert (root / "file").read_bytes() == b"x"


def test_without_a_root_nothing_is_outside(tmp_path: Path) -> None:
    Workspace(None).write(str(tmp_path / "file"), [b"x"])
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_path_that_no_system_call_can_carry(workspace: Workspace, root: Path) -> None:
    for path in (f"{root}/a\0b", f"{root}/\ud800"):
        assert refused(workspace.write, path, [b"x"]).status == 400


# Writing


def test_write_makes_folders(workspace: Workspace, root: Path) -> None:
    workspace.write(str(root / "a/b/file"), [b"one ", b"two"])
    assert (root / "a/b/file").read_bytes() == b"one two"


def test_a_new_file_gets_the_usual_mode(workspace: Workspace, root: Path) -> None:
    workspace.write(str(root / "new"), [])
    (root / "usual").write_bytes(b"")
    assert (root / "new").stat().st_mode == (root / "usual").stat().st_mode


def test_write_keeps_the_mode(workspace: Workspace, root: Path) -> None:
    script = root / "script"
    script.write_bytes(b"old")
    script.chmod(0o751)
    workspace.write(str(script), [b"new"])
    assert stat.S_IMODE(script.stat().st_mode) == 0o751
    assert script.read_bytes() == b"new"


def test_write_follows_a_symlink_and_keeps_it(workspace: Workspace, root: Path) -> None:
    (root / "real").mkdir()
    (root / "link").symlink_to(root / "real/file")
    workspace.write(str(root / "link"), [b"new"])
    assert (root / "link").is_symlink()
    assert (root / "real/file").read_bytes() == b"new"


def test_write_refuses_what_is_not_a_file(workspace: Workspace, root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "file").write_bytes(b"")
    (root / "loop").symlink_to(root / "loop")
    for path in (root, root / "pipe", root / "file/below", root / "loop", root / ("x" * 300)):
        assert refused(workspace.write, str(path), [b"x"]).status == 400
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)


@pytest.mark.parametrize(("number", "status"), [("EACCES", 403), ("EROFS", 403), ("ENOSPC", 500)])
def test_what_the_system_refuses(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch, number: str, status: int
) -> None:
    def fail(*args: object) -> None:
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code))

    (root / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    error = refused(workspace.write, str(root / "file"), [b"new"])
    assert error.status == status
    assert str(root / "file") in error.message
    assert (root / "file").read_bytes() == b"old"
    assert os.listdir(root) == ["file"]


def test_a_body_that_breaks_off_leaves_the_file_as_it_was(workspace: Workspace, root: Path) -> None:
    def body() -> Iterator[bytes]:
        yield b"half"
        raise EOFError

    (root / "file").write_bytes(b"old")
    with pytest.raises(EOFError):
        workspace.write(str(root / "file"), body())
    assert (root / "file").read_bytes() == b"old"
    assert os.listdir(root) == ["file"]


# Editing


def test_edit_answers_before_and_after(workspace: Workspace, root: Path) -> None:
    file = root / "file"
    file.write_text("a\nb\n")
    file.chmod(0o640)
    (edited,) = workspace.edit([replacing(file, "b", "c")])
    assert (edited.path, edited.before, edited.after) == (str(file), "a\nb\n", "a\nc\n")
    assert file.read_text() == "a\nc\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_edit_keeps_line_ends_and_bytes_that_are_not_utf8(workspace: Workspace, root: Path) -> None:
    (root / "file").write_bytes(b"one\r\n\xff\xfe two\r\n")
    workspace.edit([replacing(root / "file", "one", "1")])
    assert (root / "file").read_bytes() == b"1\r\n\xff\xfe two\r\n"


def test_all_errors_come_together_and_nothing_is_written(workspace: Workspace, root: Path) -> None:
    good, bad = root / "good", root / "bad"
    good.write_text("a")
    bad.write_text("b b")
    error = refused(
        workspace.edit,
        [
            replacing(good, "a", "x"),
            replacing(bad, "b", "x"),
            replacing(root / "missing", "a", "x"),
            replacing(root, "a", "x"),
            FileEdits("relative", [Edit("a", "x")]),
            FileEdits(str(good), []),
        ],
    )
    assert error.status == 400
    lines = error.message.splitlines()
    assert len(lines) == 5
    assert "2 times" in lines[0] and "missing" in lines[1] and "directory" in lines[2] and "relative" in lines[3]
    assert "at least one edit" in lines[4]
    assert good.read_text() == "a" and sorted(os.listdir(root)) == ["bad", "good"]


def test_no_file_is_refused(workspace: Workspace) -> None:
    assert refused(workspace.edit, []).status == 400


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_same_real_file_twice_is_refused(workspace: Workspace, root: Path, link: object) -> None:
    (root / "file").write_text("a")
    link(root / "file", root / "again")  # type: ignore[operator]
    error = refused(workspace.edit, [replacing(root / "file", "a", "b"), replacing(root / "again", "a", "b")])
    assert error.status == 400 and "twice" in error.message
    assert (root / "file").read_text() == "a"


def test_a_failure_before_the_last_file_is_ready_leaves_all_as_they_were(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "one").write_text("a")
    (root / "two").write_text("a")
    assert (
        refused(workspace.edit, [replacing(root / "one", "a", "b"), replacing(root / "two", "a", "\ud800")]).status
        == 400
    )
    assert (root / "one").read_text() == "a"
    assert sorted(os.listdir(root)) == ["one", "two"]
