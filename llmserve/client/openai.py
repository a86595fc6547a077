"""What is sent to servers with OpenAI's API and read of their answers, and a client of them.

The ``openai`` package takes ten times the processor time for each piece of a stream, which would
show in the times of a load generator, and twenty times as long to import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from ssl import SSLError
from typing import Any
from urllib.parse import quote, urlsplit

from llmserve.client.deadlines import Timeout, Timeouts
from llmserve.client.openai_transport import OpenAIAnswer, OpenAIRequest, OpenAISession, Peer
from llmserve.client.results import Completion, Piece, gather
from llmserve.contract.options import API_NAMES
from llmserve.errors import (
    ClientError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)

KEY = "OPENAI_API_KEY"
_REASONING = ("reasoning_content", "reasoning")
"""Servers use either name for it."""


class OpenAIApi:
    """One server: what is sent to it, what sends it, and what its answers say."""

    key_variable = KEY
    """The variable of the environment with the user's key."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"{url!r} is not an address", hint="use http://host:port/v1")
        is_encrypted = parts.scheme == "https"
        self._peer = Peer(host, port or (443 if is_encrypted else 80), is_encrypted)
        self._root = f"{parts.scheme}://{parts.netloc}"
        self.url = self._root + (quote(parts.path.rstrip("/"), safe="/%") or "/v1")

    def open(self, request: OpenAIRequest, timeout: Timeout = None) -> OpenAIAnswer:
        """Send a request, and return its answer when the head of it has arrived."""
        return OpenAIAnswer(self._peer, request, timeout)

    def session(self) -> OpenAISession:
        """Return what sends requests from an event loop."""
        return OpenAISession(self._peer)

    def get(self, path: str, *, at_root: bool = False) -> OpenAIRequest:
        """Return the request for a page of the API, or of the server itself."""
        return OpenAIRequest(self._place(path, at_root), self.headers())

    def post(
        self, path: str, body: Mapping[str, Any] | bytes, *, at_root: bool = False
    ) -> OpenAIRequest:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return OpenAIRequest(self._place(path, at_root), self.headers(), raw)

    def _place(self, path: str, at_root: bool) -> str:
        return (self._root if at_root else self.url) + path

    def request(
        self,
        model: str,
        prompt: str,
        options: Mapping[str, Any],
        *,
        stream: bool,
        usage: bool = True,
    ) -> OpenAIRequest:
        """Return the request for an answer, to a chat if the options have ``messages``.

        Some servers refuse to be asked for the ``usage`` of a stream.
        """
        is_chat = options.get("messages") is not None
        body: dict[str, Any] = {"model": model} if is_chat else {"model": model, "prompt": prompt}
        body |= {API_NAMES.get(name, name): v for name, v in options.items() if v is not None}
        if stream:
            body["stream"] = True
        if stream and usage:
            body["stream_options"] = {"include_usage": True}
        return self.post(f"/{'chat/' if is_chat else ''}completions", body)

    @staticmethod
    def headers() -> dict[str, str]:
        """Return the headers of each request, with the user's key if there is one."""
        key, headers = os.environ.get(KEY, "").strip(), {"content-type": "application/json"}
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"{KEY} contains an invalid character", hint="set it again")
        return headers | ({"authorization": f"Bearer {key}"} if key else {})

    @classmethod
    def read_line(cls, line: bytes, *, reasoning: bool = False) -> list[Piece] | None:
        """Read a line of a stream; None is its end. Anything that is no event has no pieces."""
        if not line.startswith(b"data:"):
            return []
        data = line[5:].strip()
        return None if data == b"[DONE]" else cls.read_answer(data, reasoning=reasoning)

    @staticmethod
    def read_answer(data: bytes, *, reasoning: bool = False) -> list[Piece]:
        """Read an answer or a part of it, with its ``reasoning`` as text if that is wanted.

        The last piece has the counts. What is not in the format of the API raises a ValueError,
        LookupError, TypeError or AttributeError.
        """
        content = _parsed(data)
        if error := content.get("error"):
            message = error.get("message", error) if isinstance(error, Mapping) else error
            raise RequestRejectedError(str(message))
        usage = content.get("usage") or {}
        choices = content.get("choices") if usage else content["choices"]
        pieces = [_piece(choice, reasoning) for choice in choices or ()]
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if usage:
            last = pieces.pop() if pieces else Piece("")
            pieces.append(replace(last, input_tokens=counts[0], output_tokens=counts[1]))
        return pieces

    @staticmethod
    def refusal(status: int, body: bytes) -> ClientError:
        """Return the error for a response that is not 200."""
        try:
            error = _parsed(body)["error"]
            message = str(error["message"] if isinstance(error, Mapping) else error)
        except (ValueError, LookupError, TypeError):
            words = body.decode(errors="replace").strip()[:200]
            message = f"the server answered {status}" + (f" ({words})" if words else "")
        if status == 401:
            return RequestRejectedError(message, hint=f"set {KEY}")
        if status == 404:
            return ModelNotReadyError(message)
        return (
            RequestTimeoutError(message) if status in (408, 504) else RequestRejectedError(message)
        )

    @staticmethod
    def late(timeout: Timeout) -> RequestTimeoutError:
        parts = timeout if isinstance(timeout, Timeouts) else Timeouts(timeout)
        seconds = parts.whole or parts.between or parts.first
        problem = f"no answer within {seconds or 0:g} s"
        return RequestTimeoutError(problem, hint="allow more time, or ask for less")

    def unreachable(self, error: Exception) -> UnreachableError:
        # Those of names are negative, and those of TLS have others: both say it themselves.
        number = 0 if isinstance(error, SSLError) else getattr(error, "errno", None) or 0
        words = os.strerror(number) if number > 0 else getattr(error, "strerror", None)
        # What a server sends instead of a response may have control characters.
        reason = repr(str(words or error))[1:-1] or type(error).__name__
        return UnreachableError(
            f"no server answers at {self.url}: {reason}",
            hint="start one with `llmserve gateway`, or give another address with --openai",
        )


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None


def _piece(choice: Mapping[str, Any], reasoning: bool) -> Piece:
    message = choice.get("delta") or choice.get("message") or {}
    names = ("content", *_REASONING) if reasoning else ("content",)
    texts = (choice.get("text"), *map(message.get, names))
    text = next(filter(None, texts), "")
    if not isinstance(text, str):
        raise TypeError("the text of an answer is none")
    return Piece(text, choice.get("index") or 0, choice.get("finish_reason"))


class OpenAIClient:
    """A client of one server; each request opens its own connection, so threads may share it."""

    def __init__(self, url: str, timeout: Timeout = None) -> None:
        self._api = OpenAIApi(url)
        self._timeout = timeout

    def close(self) -> None:
        """Do nothing: no connection outlives its request."""

    def generate(self, model: str, prompt: str = "", **options: Any) -> Completion:
        return gather(self.stream(model, prompt, **options), 1)[0]

    def stream(self, model: str, prompt: str = "", **options: Any) -> Iterator[Piece]:
        request = self._api.request(model, prompt, options, stream=True)
        try:
            with closing(self._api.open(request, self._timeout)) as answer:
                if answer.status != 200:
                    raise self._api.refusal(answer.status, answer.read())
                is_stream = False
                for line in answer.lines():
                    pieces = self._api.read_line(line)
                    is_stream = is_stream or bool(pieces)
                    # Only the first of several answers is asked for.
                    yield from (piece for piece in pieces or () if piece.index == 0)
            if not is_stream:
                raise ValueError("no stream")
        except TimeoutError:
            raise self._api.late(self._timeout) from None
        except OSError as error:
            raise self._api.unreachable(error) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UnreachableError(
                f"the server at {self._api.url} does not stream as OpenAI's API does",
                hint="give another address with --openai",
            ) from None
