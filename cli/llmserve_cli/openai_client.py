"""``query --openai``: a server that speaks OpenAI's API, asked as the other clients are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from llmserve.client.results import Completion, Piece, gather
from llmserve.errors import (
    ClientError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)
from llmserve_cli.terminal import printable

KEY = "OPENAI_API_KEY"
_NAMES = {"stop_words": "stop"}


class OpenAIClient:
    """Asks one server; each request has a connection of its own, so threads may share it."""

    def __init__(self, url: str, timeout: float | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"{url!r} is no address", mend="write http://host:port/v1")
        self._url = url
        self._where = host, port
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = quote(parts.path.rstrip("/"), safe="/%") or "/v1"
        self._timeout = timeout

    def close(self) -> None:
        """Nothing is kept between two requests."""

    def generate(self, model: str, prompt: str = "", **options: Any) -> Completion:
        return gather(self.stream(model, prompt, **options), 1)[0]

    def stream(self, model: str, prompt: str = "", **options: Any) -> Iterator[Piece]:
        messages = options.pop("messages", None)
        what = {"prompt": prompt} if messages is None else {"messages": messages}
        asked = {
            "model": model,
            **what,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{_NAMES.get(name, name): v for name, v in options.items() if v is not None},
        }
        path = "/completions" if messages is None else "/chat/completions"
        connection = self._kind(*self._where, timeout=self._timeout)
        try:
            answer = self._ask(connection, path, asked)
            data = None
            for data in _events(answer):
                if piece := _piece(data):
                    yield piece
            if data is None:
                raise ValueError("no stream")
        except TimeoutError:
            raise RequestTimeoutError(
                f"no answer within {self._timeout:g} s", mend="allow more time, or ask for less"
            ) from None
        except (OSError, HTTPException) as error:
            why = printable(str(error)) or type(error).__name__
            raise UnreachableError(
                f"no server answers at {self._url}: {why}",
                mend="start one with `llmserve gateway`, or name another with --openai",
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UnreachableError(
                f"what answers at {self._url} does not stream as OpenAI's API does",
                mend="name another with --openai",
            ) from None
        finally:
            connection.close()

    def _ask(self, connection: HTTPConnection, path: str, asked: Any) -> HTTPResponse:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise UsageError(f"{KEY} has a character that no key has", mend="set it again")
            headers["authorization"] = f"Bearer {key}"
        connection.request("POST", self._path + path, json.dumps(asked).encode(), headers)
        answer = connection.getresponse()
        if answer.status == 200:
            return answer
        raise _refusal(answer.status, answer.read())


def _refusal(status: int, body: bytes) -> ClientError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {status}"
    if status == 401:
        return RequestRejectedError(message, mend=f"set {KEY}")
    if status == 404:
        return ModelNotReadyError(message)
    if status in (408, 504):
        return RequestTimeoutError(message)
    return RequestRejectedError(message)


def _events(answer: HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for line in answer:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _piece(chunk: Mapping[str, Any]) -> Piece | None:
    if error := chunk.get("error"):
        told = error.get("message", error) if isinstance(error, Mapping) else error
        raise RequestRejectedError(str(told))
    usage = chunk.get("usage") or {}
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not chunk["choices"]:
        return Piece("", 0, None, *counts)
    choice = chunk["choices"][0]
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return Piece(text, 0, choice.get("finish_reason"), *counts)
