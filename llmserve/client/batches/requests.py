"""A file of requests in OpenAI's batch format: all of it is checked before anything is sent."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.contract.bounded_json import MOST, TooManyPartsError, parse_json
from llmserve.errors import UsageError

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MARK = b"\xef\xbb\xbf"
"""What some editors write at the beginning of a text in UTF-8."""


class BatchFileError(UsageError):
    """A file that is not one of requests; ``line`` says where, and ``what`` says it without."""

    def __init__(self, path: Path, what: str, *, hint: str, line: int | None = None) -> None:
        self.what = what
        self.line = line
        where = f"line {line} of {path}" if line else str(path)
        super().__init__(f"{where} {what}", hint=hint)


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file; its body stays there until it is sent."""

    # A file may have very many of them.
    __slots__ = ("custom_id", "endpoint", "model", "number", "offset", "size")

    number: int
    custom_id: str
    model: str
    endpoint: str
    offset: int
    size: int


class BatchRequests:
    """The requests of a file to these ``endpoints``; ``many`` and ``longest`` bound its lines.

    ``longest_name`` bounds what of each line stays in memory: its ``custom_id`` and its model.
    What another process has found in the file is not read again: ``known``.
    """

    def __init__(
        self,
        path: Path,
        *,
        endpoints: Sequence[str] = BATCH_ENDPOINTS,
        many: int | None = None,
        longest: int | None = None,
        longest_name: int | None = None,
        known: list[BatchRequest] | None = None,
    ) -> None:
        self._longest_name = longest_name
        try:
            self.file = path.open("rb", buffering=1 << 16)
        except OSError as error:
            problem = f"{path} cannot be used: {error.strerror}"
            raise UsageError(problem, hint="give another file") from None
        try:
            self.all = known or self._checked(path, endpoints, many, longest)
        except BaseException:
            self.file.close()
            raise

    def body(self, request: BatchRequest) -> dict[str, Any]:
        """Return the body to send; threads may share the file."""
        line = os.pread(self.file.fileno(), request.size, request.offset)
        try:
            body: dict[str, Any] = parse_json(line.decode("utf-8-sig"))["body"]
            return body
        except (ValueError, LookupError, TypeError, RecursionError):
            problem = f"line {request.number} of the input has changed"
            raise UsageError(problem, hint="start again") from None

    def close(self) -> None:
        self.file.close()

    def _checked(
        self, path: Path, endpoints: Sequence[str], many: int | None, longest: int | None
    ) -> list[BatchRequest]:
        if not stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
            raise UsageError(f"{path} is not a file", hint="save the requests in one")
        requests: list[BatchRequest] = []
        for request in self._read(path, endpoints, longest):
            requests.append(request)
            if many is not None and len(requests) > many:
                what = f"has more than {many} requests"
                raise BatchFileError(path, what, hint="divide it")
        if not requests:
            raise BatchFileError(path, "is empty", hint="write one request per line")
        return requests

    def _read(
        self, path: Path, endpoints: Sequence[str], longest: int | None
    ) -> Iterator[BatchRequest]:
        numbers: dict[str, int] = {}
        models: dict[str, str] = {}
        offset = 0
        most = -1 if longest is None else longest + 1
        for number, line in enumerate(iter(lambda: self.file.readline(most), b""), 1):
            if len(line) == most and not line.endswith(b"\n"):
                what = f"is over {longest} bytes"
                raise BatchFileError(path, what, hint="shorten it", line=number)
            if line.strip(b" \t\r\n" + _MARK if number == 1 else None):
                content = _parsed(path, number, line)
                custom_id, endpoint, model = _fields(path, number, content, endpoints)
                for field, value in (("custom_id", custom_id), ("model", model)):
                    if self._longest_name is not None and len(value) > self._longest_name:
                        what = f"has a {field} of over {self._longest_name} characters"
                        raise BatchFileError(path, what, hint="shorten it", line=number)
                first = numbers.setdefault(custom_id, number)
                if first != number:
                    what = f"has the custom_id of line {first}"
                    raise BatchFileError(path, what, hint="name each differently", line=number)
                # The name of the model is in memory once, and not once for each line.
                model = models.setdefault(model, model)
                yield BatchRequest(number, custom_id, model, endpoint, offset, len(line))
            offset += len(line)


def _parsed(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        content = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except TooManyPartsError:
        what = f"has more than {MOST} lists, objects and keys"
        raise BatchFileError(path, what, hint="divide it", line=number) from None
    except (ValueError, RecursionError):
        hint = "write one request per line"
        raise BatchFileError(path, "is not JSON", hint=hint, line=number) from None
    if not isinstance(content, dict):
        hint = "write custom_id, method, url and body into one"
        raise BatchFileError(path, "is not an object", hint=hint, line=number)
    return content


def _fields(
    path: Path, number: int, content: Mapping[str, Any], endpoints: Sequence[str]
) -> tuple[str, str, str]:
    """Return the name of a request, its endpoint and its model."""

    def wrong(what: str, hint: str) -> BatchFileError:
        return BatchFileError(path, what, hint=hint, line=number)

    custom_id, endpoint, body = (content.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise wrong("has no custom_id", "give each request a name of its own")
    if content.get("method", "POST") != "POST":
        raise wrong("has another method", "use POST")
    known = next((name for name in endpoints if name == endpoint), None)
    if known is None:
        raise wrong("has no url that a batch can ask", f"use one of {', '.join(endpoints)}")
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise wrong("has no body with a model", "give what the request sends as its body")
    if body.get("stream"):
        raise wrong("asks for a stream", "leave out stream")
    return custom_id, known, body["model"]
