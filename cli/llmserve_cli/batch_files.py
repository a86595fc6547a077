"""The files of ``llmserve batch``: requests that are read, and answers that are appended."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
SYNC_SECONDS = 1.0
"""At most this much of the answers is lost when the machine stops; none when the process does."""
_BEGIN = b'{"id": "batch_req_'
"""How each line of an output begins: nothing else at the end of a file is ever cut off."""


@dataclass(frozen=True)
class Request:
    """A line of the input; its body stays in the file until it is sent."""

    number: int
    custom_id: str
    model: str
    endpoint: str
    offset: int
    size: int


class Requests:
    """The input: all of it is checked before anything is sent."""

    def __init__(self, path: Path) -> None:
        try:
            self.file = path.open("rb", buffering=1 << 16)
        except OSError as error:
            raise _unusable(path, error) from None
        if not stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
            raise UsageError(f"{path} is not a file", hint="save the requests in one")
        self.all = list(self._read(path))
        if not self.all:
            raise UsageError(f"{path} is empty", hint="write one request per line")

    def _read(self, path: Path) -> Iterator[Request]:
        numbers: dict[str, int] = {}
        offset = 0
        for number, line in enumerate(self.file, 1):
            if line.strip(b" \t\r\n\xef\xbb\xbf" if number == 1 else None):
                request = _checked(line, number, offset, path)
                first = numbers.setdefault(request.custom_id, number)
                if first != number:
                    problem = f"lines {first} and {number} of {path} have the same custom_id"
                    raise UsageError(problem, hint="name each request differently")
                yield request
            offset += len(line)

    def body(self, request: Request) -> bytes:
        """Return the body to send; threads may share the file."""
        line = os.pread(self.file.fileno(), request.size, request.offset)
        try:
            body = json.loads(line.decode("utf-8-sig"))["body"]
        except (ValueError, LookupError, TypeError):
            raise UsageError(
                f"line {request.number} of the input has changed", hint="start again"
            ) from None
        return json.dumps(body).encode()

    def close(self) -> None:
        self.file.close()


def _checked(line: bytes, number: int, offset: int, path: Path) -> Request:
    def wrong(problem: str, hint: str) -> UsageError:
        return UsageError(f"line {number} of {path} {problem}", hint=hint)

    try:
        content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):
        raise wrong("is not JSON", "write one request per line") from None
    if not isinstance(content, dict):
        raise wrong("is not an object", "see llmserve batch --help")
    custom_id, endpoint, body = (content.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise wrong("has no custom_id", "give each request a name of its own")
    if content.get("method", "POST") != "POST":
        raise wrong("has another method", "use POST")
    if endpoint not in ENDPOINTS:
        raise wrong("has no url that a batch can ask", f"use one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise wrong("has no body with a model", "give what the request sends as its body")
    if body.get("stream"):
        raise wrong("asks for a stream", "leave out stream")
    return Request(number, custom_id, body["model"], endpoint, offset, len(line))


class Answers:
    """The output: one line for each request that has its answer, in the order of arrival."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._synced = time.monotonic()
        self._lines: dict[str, tuple[int, int]] = {}
        self._size = 0
        self.failed = 0

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, requests: Requests) -> None:
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
        self._lines[name] = self._size, len(line)
        self._size += len(line)
        self.failed += is_failed

    def append(self, content: dict[str, Any]) -> None:
        line = json.dumps(content).encode() + b"\n"
        try:
            _write(self._handle, line)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise _unusable(self.path, error) from None
        self._add(content["custom_id"], line, content["error"] is not None)

    def sync(self) -> None:
        os.fsync(self._handle)
        self._synced = time.monotonic()

    def sort(self, requests: Requests) -> None:
        """Put the lines into the order of the input; until that is done, the file stays."""
        wanted = [self._lines[r.custom_id] for r in requests.all if r.custom_id in self]
        if wanted == sorted(wanted):
            return
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        except OSError as error:
            raise _unusable(self.path.parent, error) from None
        partial = Path(name)
        try:
            for offset, size in wanted:
                _write(handle, os.pread(self._handle, size, offset))
            os.fsync(handle)
            partial.replace(self.path)
        except BaseException as error:
            with suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                raise _unusable(self.path, error) from None
            raise
        finally:
            os.close(handle)


@contextmanager
def open_answers(path: Path, requests: Requests) -> Iterator[Answers]:
    """Open or create the output, private to its user, for this process alone."""
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
        answers = Answers(path, handle)
        answers.read(requests)
        yield answers
        answers.sync()
    finally:
        os.close(handle)


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be used: {error.strerror}", hint="give another file")
