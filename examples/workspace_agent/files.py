"""Files of the workspace: paths kept inside the root, edits worked out before anything is written, whole writes."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from .edits import Edit, EditError, apply_edits
from .errors import AgentError

_STATUS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG), 400),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), 403),
}


@dataclass(frozen=True)
class FileEdits:
    path: str
    edits: Sequence[Edit]


@dataclass(frozen=True)
class EditedFile:
    """``path`` as it was asked for, and the text before and after."""

    path: str
    before: str
    after: str


class Workspace:
    """What lies under ``root``, or the whole file system where ``root`` is None.

    This keeps an honest client's paths inside. It is not a sandbox: a command that swaps a folder for a symlink between
    the check and the write gets past it, as it gets past any root by writing there itself.
    """

    def __init__(self, root: str | None) -> None:
        self.root = None if root is None else os.path.realpath(root)

    def resolve(self, path: str) -> str:
        """The real path, symlinks followed. Raises AgentError: 400 for a relative path, 403 outside the root."""
        if not os.path.isabs(path):
            raise AgentError(400, f'"{path}" is not an absolute path.')
        with _as_answers(path):
            real = os.path.realpath(path)
        if self.root is not None and os.path.commonpath([self.root, real]) != self.root:
            raise AgentError(403, f'"{path}" is outside the workspace.')
        return real

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Put ``chunks`` in the file's place, in one step. Its folder is made, its mode kept.

        Raises AgentError, and what ``chunks`` raises; the file is then as it was.
        """
        target = self.resolve(path)
        with _as_answers(path):
            status = _regular(target, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with _staged(target, chunks, status) as put_in_place:
                put_in_place()

    def edit(self, files: Sequence[FileEdits]) -> list[EditedFile]:
        """Apply all edits or, where any fails, none.

        Raises AgentError with a line for each file that is at fault: 403 if one is not permitted, else 400.
        """
        if not files:
            raise AgentError(400, "At least one file is required.")
        planned: dict[tuple[int, int], tuple[EditedFile, str, os.stat_result]] = {}
        errors: list[AgentError] = []
        for file in files:
            try:
                target = self.resolve(file.path)
                edited, status = _plan(file, target)
                identity = status.st_dev, status.st_ino
                if identity in planned:
                    raise AgentError(400, f'"{file.path}" is there twice. Give all edits of a file together.')
                planned[identity] = edited, target, status
            except AgentError as error:
                errors.append(error)
        if errors:
            raise AgentError(max(error.status for error in errors), "\n".join(error.message for error in errors))
        with ExitStack() as stack:
            ready: list[tuple[str, Callable[[], None]]] = []
            for edited, target, status in planned.values():
                with _as_answers(edited.path):
                    chunks = [edited.after.encode(errors="surrogateescape")]
                    ready.append((edited.path, stack.enter_context(_staged(target, chunks, status))))
            for path, put_in_place in ready:
                with _as_answers(path):
                    put_in_place()
        return [edited for edited, _, _ in planned.values()]


def _plan(file: FileEdits, target: str) -> tuple[EditedFile, os.stat_result]:
    """Work the edits out in memory."""
    with _as_answers(file.path):
        status = _regular(target, file.path)
        if status is None:
            raise AgentError(400, f'"{file.path}" does not exist.')
        with open(target, "rb") as opened:
            before = opened.read().decode(errors="surrogateescape")  # bytes that are not UTF-8 go through as they are
        try:
            return EditedFile(file.path, before, apply_edits(before, file.edits)), status
        except EditError as error:
            raise AgentError(400, f'"{file.path}": {error}') from None


def _regular(target: str, path: str) -> os.stat_result | None:
    """What is known of a regular file, None where there is nothing."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise AgentError(400, f'"{path}" is a directory.')
    if not stat.S_ISREG(status.st_mode):
        raise AgentError(400, f'"{path}" is not a regular file.')
    return status


@contextmanager
def _staged(target: str, chunks: Iterable[bytes], old: os.stat_result | None) -> Iterator[Callable[[], None]]:
    """Write a temporary file beside ``target``; calling what is yielded puts it in the target's place."""
    temporary = os.path.join(os.path.dirname(target), f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            os.chmod(temporary, stat.S_IMODE(old.st_mode))
        yield lambda: os.replace(temporary, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


@contextmanager
def _as_answers(path: str) -> Iterator[None]:
    """What the system refuses, as an answer that names the path as it was asked for."""
    try:
        yield
    except OSError as error:
        raise AgentError(_STATUS.get(error.errno or 0, 500), f'"{path}": {error.strerror}.') from error
    except ValueError as error:  # what no path or file can hold: a NUL, half of a surrogate pair
        raise AgentError(400, f'"{path}": {error}.') from error
