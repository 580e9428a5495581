"""Shows how run-once was added to ``examples/notes``: the service before is the service without those lines.

``python docs/notes_diff.py`` writes ``docs/notes.diff``, and with a folder's name the service as it was before there.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SERVICE = DOCS.parent / "examples" / "notes"


def after() -> dict[str, str]:
    """The service's files: name to text."""
    return {path.name: path.read_text("utf-8") for path in sorted(SERVICE.iterdir()) if path.is_file()}


def before() -> dict[str, str]:
    """The same without the lines that name run-once, and without the file that is about nothing else."""
    return {
        name: "".join(line for line in text.splitlines(keepends=True) if "runonce" not in line)
        for name, text in after().items()
        if "from flask_runonce import" not in text
    }


def diff() -> str:
    """The way from `before` to `after`, as ``git apply`` takes it."""
    old, new = before(), after()
    return "".join(_file_diff(name, old.get(name), new[name]) for name in new if old.get(name) != new[name])


def _file_diff(name: str, old: str | None, new: str) -> str:
    header = f"diff --git a/notes/{name} b/notes/{name}\n"
    if old is None:
        header += "new file mode 100644\n"
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        new.splitlines(keepends=True),
        "/dev/null" if old is None else f"a/notes/{name}",
        f"b/notes/{name}",
    )
    return header + "".join(lines)


def main(arguments: list[str]) -> None:
    if not arguments:
        (DOCS / "notes.diff").write_text(diff(), "utf-8")
        return
    folder = Path(arguments[0]) / "notes"
    folder.mkdir(parents=True)
    for name, text in before().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
