"""The last requests, for who looks at them now: what was asked, what the model read, and its times.

They are noted only while somebody looks, in memory alone, and forgotten soon after.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llmserve.errors import LLMServeError
from llmserve.runtime.contract import ADAPTER, EXTRA_FILES, IMAGE_URL, OPTIONS, SUFFIX
from llmserve_gateway.errors import ApiError
from llmserve_gateway.fields import Body
from llmserve_gateway.text_requests import ParsedRequest

_MOST_REQUESTS, _MOST_BYTES = 50, 8 << 20
_MOST_TEXT, _MOST_STRING = 64 << 10, 8 << 10
"""How much is shown of a body or a prompt, and of one text in a body."""
_LOOKS_EVERY = 10.0
"""After so many seconds without a look, nobody looks any more."""
_WAITING = 8
"""Of how many prompts it is still to be asked how their model reads them."""
_OF_PROMPTS = (
    "messages", "input_ids", OPTIONS["chat_template_kwargs"].name, ADAPTER.name, SUFFIX, EXTRA_FILES
)  # fmt: skip
_NOT_SHOWN = (*_OF_PROMPTS, IMAGE_URL.name)

ReadPrompt = Callable[[str, str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Asks a model how it reads a prompt with options."""


class Inspected:
    """What is noted of a request while it is answered."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.when = time.time()
        self.body: Mapping[str, Any] = {}
        self.bodies: Sequence[Body] = ()
        self.unknown: frozenset[str] = frozenset()
        self.asked: ParsedRequest | None = None
        """What the model is asked, as the gateway has completed it."""
        self.cached_tokens: int | None = None
        self.error = ""

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect here."""
        found = {*self.unknown}
        for body in self.bodies:
            for path, row in body.all_fields():
                if row.use == "ignored" and _given(self.body, path) is not None:
                    found.add(path)
        return sorted(found)


class Inspector:
    """Notes requests while somebody looks at them."""

    def __init__(self, read_prompt: ReadPrompt) -> None:
        self._read_prompt = read_prompt
        self._found: deque[tuple[int, dict[str, Any]]] = deque()
        self._size = 0
        self._closing: asyncio.TimerHandle | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._closing is not None

    def look(self) -> list[dict[str, Any]]:
        """Return the last requests, the newest first, and go on noting them for a while."""
        if self._closing is not None:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().call_later(_LOOKS_EVERY, self.close)
        return [found for _, found in reversed(self._found)]

    def close(self) -> None:
        """Forget all of it."""
        if self._closing is not None:
            self._closing.cancel()
        self._closing = None
        self._found.clear()
        self._size = 0
        for task in self._reading:
            task.cancel()

    def add(self, noted: Inspected, facts: Mapping[str, Any]) -> None:
        """Note a request that has been answered, unless nobody looks any more."""
        if not self.is_open:
            return
        asked = noted.asked
        sent = asked.options if asked else {}
        found = {
            "when": noted.when,
            "path": noted.path,
            **facts,
            "cached_tokens": noted.cached_tokens,
            "error": noted.error,
            "ignored": noted.ignored(),
            "body": _shown(noted.body),
            "options": _shown({k: v for k, v in sent.items() if k not in _NOT_SHOWN}),
            "prompt": None,
            "prompt_tokens": None,
        }
        size = len(found["body"]) + len(found["options"])
        self._found.append((size, found))
        self._size += size
        self._trim()
        if asked is not None and len(self._reading) < _WAITING:
            task = asyncio.ensure_future(self._read(asked, found))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _read(self, asked: ParsedRequest, found: dict[str, Any]) -> None:
        prompt, options = asked.model_calls()[0]
        of_prompt = {name: options[name] for name in _OF_PROMPTS if options.get(name)}
        async with self._one:
            with suppress(ApiError, LLMServeError, asyncio.TimeoutError):
                report = await self._read_prompt(asked.model, prompt, of_prompt)
                found["prompt"] = str(report["text"])[:_MOST_TEXT]
                found["prompt_tokens"] = len(report["ids"])
                self._size += len(found["prompt"])
                self._found = deque(
                    (size + len(found["prompt"]) if each is found else size, each)
                    for size, each in self._found
                )
                self._trim()

    def _trim(self) -> None:
        while len(self._found) > _MOST_REQUESTS or (self._size > _MOST_BYTES and self._found):
            self._size -= self._found.popleft()[0]


def _given(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


def _shown(content: Any) -> str:
    """Return a body as a text, without images and without the rest of what is long."""
    return json.dumps(_short(content), ensure_ascii=False, indent=1)[:_MOST_TEXT]


def _short(content: Any) -> Any:
    if isinstance(content, str):
        if content.startswith("data:"):
            return f"{content.partition(',')[0][:64]},…"
        return content if len(content) <= _MOST_STRING else f"{content[:_MOST_STRING]}…"
    if isinstance(content, Mapping):
        return {str(name): _short(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_short(each) for each in content[:_MOST_STRING]]
    return content
