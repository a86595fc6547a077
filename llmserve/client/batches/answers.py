"""The answers to a file of requests: lines in OpenAI's format, which a later run continues."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from llmserve.client.batches.requests import BatchRequests
from llmserve.errors import UsageError

SYNC_SECONDS = 1.0
"""At most this much of the answers is lost when the machine stops; none when the process does."""
_BEGIN = b'{"id": "batch_req_'
"""How each line begins: nothing else at the end of a file is ever cut off."""
_LINE_ENDS = "\x85\u2028\u2029"
"""What else ends a line for some readers, such as ``str.splitlines``."""


def answer_line(
    custom_id: str,
    *,
    status: int | None = None,
    request_id: str = "",
    body: Any = None,
    error: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Return the line for a request: what the server answered, if anything, and the error."""
    answered = {"status_code": status, "request_id": request_id, "body": body}
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": None if status is None else answered,
        "error": None if error is None else {"code": error[0], "message": error[1]},
    }


class _Line(NamedTuple):
    offset: int
    size: int
    is_failed: bool


class BatchAnswers:
    """A file of answers: one line for each request that has its own, in the order of arrival."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._synced = time.monotonic()
        self._lines: dict[str, _Line] = {}
        self._size = 0
        self.failed = 0

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, requests: BatchRequests) -> None:
        """Read what an earlier run has answered, and cut off the line that it did not finish."""
        names = {request.custom_id for request in requests.all}
        with os.fdopen(os.dup(self._handle), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self._cut(line)
                    break
                name, is_failed = self._answered(line)
                if name not in names or name in self._lines:
                    raise self._foreign()
                self._add(name, line, is_failed)

    def append(self, content: dict[str, Any], body: bytes | None = None) -> None:
        """Add a line; ``body`` is the JSON that a server answered, if ``content`` has none."""
        line = json.dumps(content).encode() + b"\n"
        if body is not None:
            line = _with_body(line, body)
        try:
            _write(self._handle, line)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()
        except OSError as error:
            # A part of a line would be in the way of the next.
            with suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise _unusable(self.path, error) from None
        self._add(content["custom_id"], line, content["error"] is not None)

    def sync(self) -> None:
        os.fsync(self._handle)
        self._synced = time.monotonic()

    def sort(self, requests: BatchRequests) -> None:
        """Put the lines into the order of the input; until that is done, the file stays."""
        wanted = [self._lines[r.custom_id] for r in requests.all if r.custom_id in self]
        if wanted != sorted(wanted):
            self._copy(wanted, self.path)

    def drop_failed(self) -> None:
        """Take out the lines with an error; until that is done, the file stays."""
        kept = [line for line in self._lines.values() if not line.is_failed]
        if len(kept) < len(self._lines):
            self._copy(kept, self.path)

    def save(self, path: Path, *, failed: bool) -> bool:
        """Copy the lines with an error, or those without, to another file if there are any."""
        lines = [line for line in self._lines.values() if line.is_failed == failed]
        if lines:
            self._copy(lines, path)
        return bool(lines)

    def _copy(self, lines: list[_Line], path: Path) -> None:
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise _unusable(path.parent, error) from None
        partial = Path(name)
        try:
            for line in lines:
                _write(handle, os.pread(self._handle, line.size, line.offset))
            os.fsync(handle)
            partial.replace(path)
        except BaseException as error:
            with suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                raise _unusable(path, error) from None
            raise
        finally:
            os.close(handle)

    def _answered(self, line: bytes) -> tuple[str, bool]:
        try:
            content = json.loads(line)
            return str(content["custom_id"]), content["error"] is not None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise self._foreign() from None

    def _cut(self, line: bytes) -> None:
        if line[: len(_BEGIN)] != _BEGIN[: len(line)]:
            raise self._foreign()
        os.ftruncate(self._handle, self._size)

    def _foreign(self) -> UsageError:
        return UsageError(
            f"{self.path} has something other than answers to this input", hint="give another file"
        )

    def _add(self, name: str, line: bytes, is_failed: bool) -> None:
        self._lines[name] = _Line(self._size, len(line), is_failed)
        self._size += len(line)
        self.failed += is_failed


@contextmanager
def open_answers(path: Path, requests: BatchRequests) -> Iterator[BatchAnswers]:
    """Open or create a file of answers, private to its user, for this process alone."""
    # A link is followed first, so that sorting replaces the file and not the link.
    path = path.resolve()
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UsageError(f"{path} is not a file", hint="give another name")
        if os.path.sameopenfile(handle, requests.file.fileno()):
            raise UsageError("input and output are the same file", hint="give another output")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another batch writes to {path}", hint="wait for it, or give another file"
            ) from None
        answers = BatchAnswers(path, handle)
        answers.read(requests)
        yield answers
        answers.sync()
    finally:
        os.close(handle)


def _with_body(line: bytes, body: bytes) -> bytes:
    """Return a line with a body that may be very large, and so is not parsed."""
    for end in "\n\r":  # Between tokens only.
        body = body.replace(end.encode(), b" ")
    if not body.isascii():
        for end in _LINE_ENDS:
            body = body.replace(end.encode(), json.dumps(end)[1:-1].encode())
    # Quotes within a text have a backslash before them.
    before, _, after = line.rpartition(b'"body": null')
    return b'%b"body": %b%b' % (before, body, after)


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be used: {error.strerror}", hint="give another file")
