"""Senders of single requests: to Triton with llmserve's client, or to an OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

from llmserve.client import AsyncClient, Completion, Piece, connect_async
from llmserve.errors import (
    ClientError,
    LLMServeError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)
from llmserve_bench.prompts import Request
from llmserve_bench.results import Load

Api = Literal["triton", "completions", "chat"]
Parts = list[tuple[float, "Piece | Completion"]]
"""The parts of an answer, each with its arrival time."""
_LONGEST_LINE = 1 << 20
_TEXTS = ("content", "reasoning_content", "reasoning")
"""Text fields in a part of a chat answer; servers use either name for reasoning."""


class TritonSender:
    def __init__(self, _: Api, url: str, model: str, load: Load) -> None:
        self._client: AsyncClient = connect_async(url, timeout=load.timeout)
        self._model = model
        self._stream = load.stream

    async def __aenter__(self) -> TritonSender:
        await self._client.model(self._model)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def send(self, request: Request, parts: Parts) -> None:
        """Send a request and append each part of its answer when it arrives."""
        model, prompt, options = self._model, request.prompt, request.options
        if not self._stream:
            answer = await self._client.generate(model, prompt, **options)
            parts.append((time.monotonic(), answer))
            return
        async with aclosing(self._client.stream(model, prompt, **options)) as stream:
            async for piece in stream:
                parts.append((time.monotonic(), piece))


class OpenAISender:
    """Sends completions or chat completions, with the key from ``OPENAI_API_KEY`` if it is set."""

    def __init__(self, api: Api, url: str, model: str, load: Load) -> None:
        self._address = f"{base_url(url)}/{'chat/' if api == 'chat' else ''}completions"
        self._chat = api == "chat"
        self._model = model
        self._load = load
        self._session: Any = None

    async def __aenter__(self) -> OpenAISender:
        aiohttp, key = import_aiohttp(), os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._load.timeout),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            read_bufsize=_LONGEST_LINE,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def send(self, request: Request, parts: Parts) -> None:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self._chat:
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        body = {"model": self._model, **prompt, **request.options}
        if self._load.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            await self._post(body, parts)
        except asyncio.TimeoutError:
            problem = f"no answer within {self._load.timeout:g} s"
            raise RequestTimeoutError(problem, mend="raise --timeout") from None
        except import_aiohttp().ClientError as error:
            raise UnreachableError(f"{self._address} does not answer: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RequestRejectedError("the response is not in OpenAI's format") from None

    async def _post(self, body: dict[str, Any], parts: Parts) -> None:
        async with self._session.post(self._address, json=body) as response:
            if response.status != 200:
                raise refusal(response.status, await response.text())
            if not self._load.stream:
                content = json.loads(await response.read())
                read_answer(content, [content["choices"][0]], parts)
                return
            async for line in response.content:
                if line.startswith(b"data:") and read_event(line[5:].strip(), parts):
                    return
        raise RequestRejectedError("the stream broke off before its end")


Sender = TritonSender | OpenAISender


def read_event(data: bytes, parts: Parts) -> bool:
    """Add the content of a stream's event; return whether it was the last one."""
    if data == b"[DONE]":
        return True
    content = json.loads(data)
    if error := content.get("error"):
        raise RequestRejectedError(str(error.get("message") or error))
    read_answer(content, content.get("choices") or (), parts)
    return False


def read_answer(content: Any, choices: Any, parts: Parts) -> None:
    """Add an answer, or a piece of it: its text, its finish reason, and the counts."""
    now = time.monotonic()
    for choice in choices:
        message = choice.get("message") or choice.get("delta")
        if message is None:
            text = choice["text"]
        else:
            # Reasoning is generated, and counted in usage, like the rest of the answer.
            text = next(filter(None, map(message.get, _TEXTS)), None)
        if text:
            parts.append((now, Piece(text)))
        if reason := choice.get("finish_reason"):
            _amend(parts, now, finish_reason=reason)
    if usage := content.get("usage"):
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        _amend(parts, now, input_tokens=prompt, output_tokens=completion)


def _amend(parts: Parts, now: float, **changes: Any) -> None:
    """Add what follows the text, such as the counts, to the last part."""
    at, last = parts.pop() if parts else (now, Piece(""))
    parts.append((at, replace(last, **changes)))


def refusal(status: int, text: str) -> ClientError:
    try:
        error = json.loads(text)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        message = text.strip()[:200] or "no reason given"
    kind = ModelNotReadyError if status == 404 else RequestRejectedError
    return kind(f"HTTP {status}: {message}")


def base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        mend = "write it with http://, as in http://127.0.0.1:8080/v1"
        raise UsageError(f"{url!r} is not the address of an OpenAI endpoint", mend=mend)
    return url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def import_aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        from llmserve.plugin import install_command

        mend = install_command("llmserve-bench[openai]")
        raise LLMServeError("--openai needs aiohttp", mend=mend) from None
    return aiohttp
