"""Several Tritons that serve the same models, asked as if they were one.

The one with the fewest requests under way is asked, unless another has read the beginning of the
prompt before and is hardly busier. One that fails is left out until a canary has been answered.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from llmserve.client import AsyncClient, Completion, Piece, connect_async
from llmserve.client.model import ModelInfo
from llmserve.errors import (
    LLMServeError,
    ModelNotReadyError,
    RequestTimeoutError,
    UnreachableError,
)

_BLOCK = 256
"""Bytes, some sixty tokens: chats of one system prompt meet, and those of a short one spread."""
_BLOCKS = 128
_REMEMBERED = 1 << 16
_SLACK = 2
_SHARE = 1 / 4
"""So many requests, or this part of them, a replica may be ahead of others to keep a prefix."""
_AGAIN = 0.5
_CANARY_SECONDS = 5.0
_SOON_SECONDS = 1.0
_ALL = ""

T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One Triton; ``out`` are the models that it was last seen not to answer for, or all."""

    url: str
    client: AsyncClient
    running: int = 0
    out: set[str] = field(default_factory=set)

    def answers(self, model: str) -> bool:
        return not self.out & {model, _ALL}


@dataclass
class _Request:
    """A request on its way; ``tried`` are those that have been asked."""

    model: str
    blocks: Sequence[bytes]
    timeout: float | None
    sent: float = field(default_factory=time.monotonic)
    tried: list[Replica] = field(default_factory=list)
    begun: bool = False

    def left(self) -> float | None:
        """Return how many seconds it has left."""
        if self.timeout is None or len(self.tried) < 2:
            return self.timeout
        return max(0.001, self.sent + self.timeout - time.monotonic())


class Replicas:
    """Has what a gateway needs of :class:`AsyncClient`; a request stays with who answers it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Replica(url, connect_async(url)) for url in urls]
        self._readers: OrderedDict[bytes, set[Replica]] = OrderedDict()
        """Who has read a block, and all blocks before it; those asked for last come last."""
        self._canaries: set[asyncio.Future[None]] = set()
        self._old: list[AsyncClient] = []

    async def close(self) -> None:
        for canary in self._canaries:
            canary.cancel()
        clients = [*self._old, *(one.client for one in self.all)]
        await asyncio.gather(*(client.close() for client in clients))

    # What is asked

    async def models(self) -> list[str]:
        """Return what any of them has loaded."""
        found = await _soon([one.client.models() for one in self._likely(_ALL)])
        return sorted({name for names in found for name in names})

    async def model_ready(self, name: str) -> bool:
        return any(await _soon([one.client.model_ready(name) for one in self._likely(name)]))

    async def model(self, name: str, *, anew: bool = False) -> ModelInfo:
        errors = []
        for one in sorted(self.all, key=lambda one: not one.answers(name)):
            try:
                return await one.client.model(name, anew=anew)
            except (UnreachableError, ModelNotReadyError) as error:
                errors.append(error)
        raise errors[0]

    async def generate(
        self, model: str, prompt: str = "", *, timeout: float | None = None, **options: Any
    ) -> Completion:
        request = _Request(model, blocks(model, prompt, options), timeout)
        while True:
            with self._asked(request) as one:
                return await one.client.generate(model, prompt, timeout=request.left(), **options)

    async def stream(
        self, model: str, prompt: str = "", *, timeout: float | None = None, **options: Any
    ) -> AsyncGenerator[Piece, None]:
        request = _Request(model, blocks(model, prompt, options), timeout)
        while True:
            with self._asked(request) as one:
                answer = one.client.stream(model, prompt, timeout=request.left(), **options)
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        request.begun = True
                        yield piece
                return

    # Who is asked

    def answers(self, model: str) -> bool:
        """Say whether there is one that answers for a model, as far as anybody knows."""
        return any(one.answers(model) for one in self.all)

    def choose(self, request: _Request) -> Replica:
        """Return who is to be asked next, and remember what it will have read."""
        left = [one for one in self.all if one not in request.tried]
        left = [one for one in left if one.answers(request.model)] or left
        least = min(one.running for one in left)
        near = [one for one in left if one.running < least + max(_SLACK, least * _SHARE)]
        for block in reversed(request.blocks):
            if readers := [one for one in near if one in self._readers.get(block, ())]:
                near = readers
                break
        # Where all is even the hash decides, so that several gateways agree.
        first = request.blocks[0]
        chosen = min(
            near, key=lambda one: (one.running, blake2b(first + one.url.encode()).digest())
        )
        for block in request.blocks:
            self._readers.setdefault(block, set()).add(chosen)
            self._readers.move_to_end(block)
        while len(self._readers) > _REMEMBERED:
            self._readers.popitem(last=False)
        return chosen

    def _likely(self, model: str) -> list[Replica]:
        return [one for one in self.all if one.answers(model)] or self.all

    @contextmanager
    def _asked(self, request: _Request) -> Iterator[Replica]:
        """Count a request with who is asked; what fails there is to be tried again elsewhere."""
        one = self.choose(request)
        request.tried.append(one)
        one.running += 1
        try:
            yield one
        except LLMServeError as error:
            if not is_of_the_replica(error):
                raise
            self._leave_out(one, request.model, whole=isinstance(error, UnreachableError))
            if request.begun or len(request.tried) == len(self.all):
                raise
        finally:
            one.running -= 1

    # Who is left out

    def _leave_out(self, one: Replica, model: str, *, whole: bool) -> None:
        if one.answers(model):
            one.out.add(_ALL if whole else model)
            canaries = self._send_canaries(one, model, whole=whole)
            # Not in the context of the request, whose trace is not theirs.
            canary = Context().run(asyncio.ensure_future, canaries)
            self._canaries.add(canary)
            canary.add_done_callback(self._canaries.discard)

    async def _send_canaries(self, one: Replica, model: str, *, whole: bool) -> None:
        """Ask for a token until one comes, and have the replica asked by others again."""
        try:
            while not await self._canary(one, model, whole=whole):
                pass
        finally:
            one.out.discard(_ALL if whole else model)

    async def _canary(self, one: Replica, model: str, *, whole: bool) -> bool:
        await asyncio.sleep(_AGAIN)
        # gRPC waits longer and longer before it connects anew.
        client = connect_async(one.url) if whole else one.client
        try:
            await client.generate(model, "Hi", max_tokens=1, timeout=_CANARY_SECONDS)
        except LLMServeError as error:
            # Who refuses a request lives.
            if is_of_the_replica(error) or isinstance(error, RequestTimeoutError):
                if whole:
                    await client.close()
                return False
        if whole:
            # Whoever asked it all the same may still be reading.
            self._old.append(one.client)
            one.client = client
        return True


async def _soon(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what is answered at once, or at all where nothing is."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        done, late = await asyncio.wait(tasks, timeout=_SOON_SECONDS)
        if late and all([task.exception() for task in done]):
            done |= (await asyncio.wait(late))[0]
    finally:
        for task in tasks:
            task.cancel()
    errors = [error for task in done if (error := task.exception())]
    if len(errors) == len(done):
        raise errors[0]
    return [task.result() for task in done if not task.exception()]


def is_of_the_replica(error: LLMServeError) -> bool:
    """Say whether a request failed for who was asked, and not for what was asked."""
    gone = isinstance(error, (UnreachableError, ModelNotReadyError))
    return gone or "has died" in error.problem


def blocks(model: str, prompt: str, options: Mapping[str, Any]) -> list[bytes]:
    """Return a hash of each leading block of a prompt and all before it; one where it is short."""
    ids, messages = options.get("input_ids"), options.get("messages")
    if messages:
        told = [options.get("chat_template_kwargs"), messages]
        read = json.dumps(told).encode()
    else:
        read = json.dumps(ids).encode() if ids else prompt.encode(errors="replace")
    hashed = blake2b(model.encode() + b"\0", digest_size=8)
    if len(read) < _BLOCK:
        hashed.update(read)
        return [hashed.digest()]
    found = []
    for start in range(0, min(len(read) - _BLOCK + 1, _BLOCK * _BLOCKS), _BLOCK):
        hashed.update(read[start : start + _BLOCK])
        found.append(hashed.digest())
    return found
