"""The client of ``query --openai``, for servers with OpenAI's API."""

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
    """A client of one server; each request opens its own connection, so threads may share it."""

    def __init__(self, url: str, timeout: float | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"{url!r} is not an address", mend="use http://host:port/v1")
        self._url = url
        self._address = host, port
        self._connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = quote(parts.path.rstrip("/"), safe="/%") or "/v1"
        self._timeout = timeout

    def close(self) -> None:
        """Do nothing: no connection outlives its request."""

    def generate(self, model: str, prompt: str = "", **options: Any) -> Completion:
        return gather(self.stream(model, prompt, **options), 1)[0]

    def stream(self, model: str, prompt: str = "", **options: Any) -> Iterator[Piece]:
        messages = options.pop("messages", None)
        content = {"prompt": prompt} if messages is None else {"messages": messages}
        body = {
            "model": model,
            **content,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{_NAMES.get(name, name): v for name, v in options.items() if v is not None},
        }
        path = "/completions" if messages is None else "/chat/completions"
        connection = self._connection_type(*self._address, timeout=self._timeout)
        try:
            response = self._send(connection, path, body)
            event = None
            for event in _events(response):
                if piece := _piece(event):
                    yield piece
            if event is None:
                raise ValueError("no stream")
        except (OSError, HTTPException) as error:
            # Without a timeout of its own, this is the system's attempt to connect.
            if isinstance(error, TimeoutError) and self._timeout is not None:
                raise RequestTimeoutError(
                    f"no answer within {self._timeout:g} s", mend="allow more time, or ask for less"
                ) from None
            reason = printable(str(error)) or type(error).__name__
            raise UnreachableError(
                f"no server answers at {self._url}: {reason}",
                mend="start one with `llmserve gateway`, or give another address with --openai",
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UnreachableError(
                f"the server at {self._url} does not stream as OpenAI's API does",
                mend="give another address with --openai",
            ) from None
        finally:
            connection.close()

    def _send(self, connection: HTTPConnection, path: str, body: Any) -> HTTPResponse:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise UsageError(f"{KEY} contains an invalid character", mend="set it again")
            headers["authorization"] = f"Bearer {key}"
        connection.request("POST", self._path + path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        raise _refusal(response.status, response.read())


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


def _events(response: HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _piece(chunk: Mapping[str, Any]) -> Piece | None:
    if error := chunk.get("error"):
        message = error.get("message", error) if isinstance(error, Mapping) else error
        raise RequestRejectedError(str(message))
    usage = chunk.get("usage") or {}
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not chunk["choices"]:
        return Piece("", 0, None, *counts)
    choice = chunk["choices"][0]
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return Piece(text, 0, choice.get("finish_reason"), *counts)
