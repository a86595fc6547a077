"""Senders of single requests: to Triton with llmserve's client, or to an OpenAI endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from llmserve.client import (
    AsyncClient,
    Completion,
    OpenAIApi,
    OpenAIRequest,
    OpenAISession,
    Piece,
    connect_async,
)
from llmserve.errors import RequestRejectedError
from llmserve.runtime import contract
from llmserve_bench.prompts import Request
from llmserve_bench.results import Load

Api = Literal["triton", "completions", "chat", "embeddings"]
Parts = list[tuple[float, "Piece | Completion"]]
"""The parts of an answer, each with its arrival time."""
_AFTER_TEXT = ("finish_reason", "input_tokens", "output_tokens")


class TritonSender:
    def __init__(self, _: Api, url: str, model: str, load: Load) -> None:
        self._client: AsyncClient = connect_async(url, timeout=load.timeout)
        self._model = model
        self._stream = load.stream
        self._urls = urls_of(load)
        self._reads_pairs = False

    async def __aenter__(self) -> TritonSender:
        info = await self._client.model(self._model)
        pair = info.inputs.get(contract.TEXT_PAIR.name)
        self._reads_pairs = pair is not None and not pair.optional
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def send(self, request: Request, parts: Parts) -> None:
        """Send a request and append each part of its answer when it arrives."""
        model, prompt, options = self._model, request.prompt, request.options
        if request.texts:
            texts, pairs = list(request.texts), None
            if self._reads_pairs:
                # The first is the query of them all.
                texts, pairs = [texts[0]] * len(texts), texts
            computed = await self._client.compute(model, texts, pairs=pairs, **options)
            tokens = None if computed.input_tokens is None else sum(computed.input_tokens)
            parts.append((time.monotonic(), Completion("", input_tokens=tokens)))
            return
        asked: dict[str, Any] = {"prompt": prompt, **options}
        if url := self._urls.get(request.image):
            content = contract.with_images(prompt, [url], in_parts=False)
            chat = [*request.messages[:-1], {"role": "user", "content": content}]
            asked = {"messages": chat, contract.IMAGE_URL.name: [url], **options}
        if not self._stream:
            answer = await self._client.generate(model, **asked)
            parts.append((time.monotonic(), answer))
            return
        async with aclosing(self._client.stream(model, **asked)) as stream:
            async for piece in stream:
                parts.append((time.monotonic(), piece))


class OpenAISender:
    """Sends completions or chat completions, with the key from ``OPENAI_API_KEY`` if it is set."""

    def __init__(self, api: Api, url: str, model: str, load: Load) -> None:
        self._api = OpenAIApi(url)
        self._chat = api == "chat"
        self._model = model
        self._load = load
        self._urls = urls_of(load)
        self._session: OpenAISession = self._api.session()

    async def __aenter__(self) -> OpenAISender:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.__aexit__(*error)

    async def send(self, request: Request, parts: Parts) -> None:
        post = self._post_of(request)
        try:
            await self._post(post, parts)
        except TimeoutError:
            raise self._api.late(self._load.timeout) from None
        except OSError as error:
            raise self._api.unreachable(error) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RequestRejectedError("the response is not in OpenAI's format") from None

    def _post_of(self, request: Request) -> OpenAIRequest:
        options, model = dict(request.options), self._model
        if adapter := options.pop(contract.ADAPTER.name, ""):
            model = f"{model}:{adapter}"
        if request.texts:
            body = {"model": model, "input": request.texts, "encoding_format": "base64"}
            return self._api.post("/embeddings", {**body, **options})
        if self._chat:
            chat = [*request.messages] or [{"role": "user", "content": request.prompt}]
            if url := self._urls.get(request.image):
                content = contract.with_images(request.prompt, [url], in_parts=True)
                chat[-1] = {"role": "user", "content": content}
            options = {"messages": chat, **options}
        return self._api.request(model, request.prompt, options, stream=self._load.stream)

    async def _post(self, post: OpenAIRequest, parts: Parts) -> None:
        with closing(await self._session.open(post, self._load.timeout)) as answer:
            if answer.status != 200:
                raise self._api.refusal(answer.status, await answer.read())
            # Reasoning is generated, and counted in usage, like the rest of the answer.
            if not self._load.stream:
                add(self._api.read_answer(await answer.read(), reasoning=True), parts)
                return
            async for line in answer.lines():
                pieces = self._api.read_line(line, reasoning=True)
                if pieces is None:
                    return
                add(pieces, parts)
        raise RequestRejectedError("the stream broke off before its end")


Sender = TritonSender | OpenAISender


def urls_of(load: Load) -> dict[str, str]:
    """Return the images of a load as requests have them, by their files."""
    return {file: contract.image_url(Path(file)) for file in load.images if file}


def add(pieces: Iterable[Piece], parts: Parts) -> None:
    """Add what arrived; what follows the text, such as the counts, belongs to the last part."""
    now = time.monotonic()
    for piece in pieces:
        values = {name: getattr(piece, name) for name in _AFTER_TEXT}
        known = {name: value for name, value in values.items() if value is not None}
        if piece.text:
            parts.append((now, piece))
        elif known:
            at, last = parts.pop() if parts else (now, Piece(""))
            parts.append((at, replace(last, **known)))
