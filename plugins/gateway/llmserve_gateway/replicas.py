"""Load balancing over several Tritons that serve the same models.

A request goes to the replica with the fewest requests in flight, unless another has answered its
session, or read the start of its prompt, before and is hardly busier. A failed replica is excluded
until it answers a canary.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, TypeVar

from llmserve.client import AsyncClient, Completion, Computed, ModelInfo, Piece, connect_async
from llmserve.errors import (
    LLMServeError,
    ModelNotReadyError,
    UnreachableError,
)
from llmserve.plugin import Address
from llmserve.runtime.contract import CACHE_SALT
from llmserve.server import health

_BLOCK = 256
"""Bytes, about sixty tokens: a long system prompt groups its chats, a short one spreads them."""
_MAX_BLOCKS = 128
_MAX_REMEMBERED = 1 << 16
_SLACK = 2
_SLACK_SHARE = 1 / 4
"""To keep a prefix, a replica may have this many requests, or this part, more than others."""
_GATHER_SECONDS = 1.0
_ALL = ""

T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One Triton; ``excluded`` are the models that it recently failed to serve, or all."""

    address: Address
    client: AsyncClient
    running: int = 0
    excluded: set[str] = field(default_factory=set)
    distrusted: frozenset[str] = frozenset()
    """The models whose answers are wrong here, says `serve`."""

    @property
    def url(self) -> str:
        return self.address.grpc

    def serves(self, model: str) -> bool:
        return not self.excluded & {model, _ALL}


@dataclass
class _Request:
    """A request in flight; ``tried`` are the replicas that it was sent to."""

    model: str
    blocks: Sequence[bytes]
    timeout: float | None
    session: bytes = b""
    """A hash of the name of its session, if it has one."""
    sent: float = field(default_factory=time.monotonic)
    on_replica: Callable[[str], None] | None = None
    """Is told the address of each that it is sent to."""
    tried: list[Replica] = field(default_factory=list)
    started: bool = False

    def remaining_timeout(self) -> float | None:
        if self.timeout is None or len(self.tried) < 2:
            return self.timeout
        return max(0.001, self.sent + self.timeout - time.monotonic())


class Replicas:
    """Offers what a gateway needs of :class:`AsyncClient`; a request stays with its replica."""

    def __init__(self, tritons: Sequence[Address]) -> None:
        self.all = [Replica(triton, _connect(triton.grpc)) for triton in tritons]
        self._readers: OrderedDict[bytes, set[Replica]] = OrderedDict()
        """The replicas that have read a block and all blocks before it; recent blocks are last."""
        self._canaries: set[asyncio.Future[None]] = set()
        self._old_clients: list[AsyncClient] = []

    async def close(self) -> None:
        for canary in self._canaries:
            canary.cancel()
        clients = [*self._old_clients, *(replica.client for replica in self.all)]
        await asyncio.gather(*(client.close() for client in clients))

    # Requests

    async def models(self) -> list[str]:
        """Return the models that any replica has loaded."""
        lists = await _gather([replica.client.models() for replica in self._serving(_ALL)])
        return sorted({name for names in lists for name in names})

    async def model_ready(self, name: str) -> bool:
        requests = [replica.client.model_ready(name) for replica in self._serving(name)]
        return any(await _gather(requests))

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        errors = []
        for replica in sorted(self.all, key=lambda replica: not replica.serves(name)):
            try:
                return await replica.client.model(name, refresh=refresh)
            except (UnreachableError, ModelNotReadyError) as error:
                errors.append(error)
        raise errors[0]

    async def generate(
        self,
        model: str,
        prompt: str = "",
        *,
        timeout: float | None = None,
        session: str = "",
        on_replica: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Completion:
        request = self._request(model, prompt, options, timeout, session, on_replica)
        while True:
            with self._attempt(request) as replica:
                timeout = request.remaining_timeout()
                return await replica.client.generate(model, prompt, timeout=timeout, **options)

    async def compute(
        self,
        model: str,
        texts: list[str],
        *,
        pairs: list[str] | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Computed:
        # What a replica has read before does not help it with these.
        request = _Request(model, (), timeout)
        while True:
            with self._attempt(request) as replica:
                timeout = request.remaining_timeout()
                return await replica.client.compute(
                    model, texts, pairs=pairs, timeout=timeout, **options
                )

    async def stream(
        self,
        model: str,
        prompt: str = "",
        *,
        timeout: float | None = None,
        session: str = "",
        on_replica: Callable[[str], None] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Piece, None]:
        request = self._request(model, prompt, options, timeout, session, on_replica)
        while True:
            with self._attempt(request) as replica:
                timeout = request.remaining_timeout()
                answer = replica.client.stream(model, prompt, timeout=timeout, **options)
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        request.started = True
                        yield piece
                return

    # Choice of a replica

    def distrust(self, faults: Mapping[str, frozenset[str]]) -> None:
        """Send requests elsewhere, if there is elsewhere: models by the replicas' addresses."""
        for replica in self.all:
            replica.distrusted = faults.get(replica.url, frozenset())

    def is_available(self, model: str) -> bool:
        """Return whether any replica serves a model, as far as is known."""
        return any(replica.serves(model) for replica in self.all)

    def choose(self, request: _Request) -> Replica:
        """Return the replica to try next, and remember what it will have read and answered."""
        untried = [replica for replica in self.all if replica not in request.tried]
        candidates = [replica for replica in untried if replica.serves(request.model)] or untried
        trusted = [each for each in candidates if request.model not in each.distrusted]
        candidates = trusted or candidates
        least = min(replica.running for replica in candidates)
        limit = least + (max(_SLACK, least * _SLACK_SHARE) if request.blocks else 1)
        candidates = [replica for replica in candidates if replica.running < limit]
        # What a client says belongs together comes before what begins alike.
        candidates = self._readers_of([request.session], candidates)
        candidates = self._readers_of(reversed(request.blocks), candidates)
        # The hash breaks ties, so that several gateways agree where a prompt has been read.
        first = request.session or (request.blocks[0] if request.blocks else token_bytes(8))
        chosen = min(
            candidates, key=lambda r: (r.running, blake2b(first + r.url.encode()).digest())
        )
        for block in (*request.blocks, *filter(None, [request.session])):
            self._readers.setdefault(block, set()).add(chosen)
            self._readers.move_to_end(block)
        while len(self._readers) > _MAX_REMEMBERED:
            self._readers.popitem(last=False)
        return chosen

    def _readers_of(self, blocks: Iterable[bytes], among: list[Replica]) -> list[Replica]:
        """Return which of these have read the first block that any has; all if none has."""
        for block in blocks:
            if matches := [each for each in among if each in self._readers.get(block, ())]:
                return matches
        return among

    def _request(
        self,
        model: str,
        prompt: str,
        options: Mapping[str, Any],
        timeout: float | None,
        session: str,
        on_replica: Callable[[str], None] | None,
    ) -> _Request:
        if len(self.all) == 1:
            # One replica reads all prompts anyway.
            return _Request(model, (), timeout, on_replica=on_replica)
        name = session_hash(model, session, options)
        return _Request(model, blocks(model, prompt, options), timeout, name, on_replica=on_replica)

    def _serving(self, model: str) -> list[Replica]:
        return [replica for replica in self.all if replica.serves(model)] or self.all

    @contextmanager
    def _attempt(self, request: _Request) -> Iterator[Replica]:
        """Count a request with its replica; swallow an error if another should be tried."""
        replica = self.choose(request)
        request.tried.append(replica)
        if request.on_replica is not None:
            request.on_replica(replica.url)
        replica.running += 1
        try:
            yield replica
        except LLMServeError as error:
            if not is_replica_failure(error):
                raise
            self._exclude(replica, request.model, unreachable=isinstance(error, UnreachableError))
            if request.started or len(request.tried) == len(self.all):
                raise
        finally:
            replica.running -= 1

    # Exclusion of replicas

    def _exclude(self, replica: Replica, model: str, *, unreachable: bool) -> None:
        if replica.serves(model):
            replica.excluded.add(_ALL if unreachable else model)
            canaries = self._send_canaries(replica, model, unreachable=unreachable)
            # A separate context, because the request's trace does not include canaries.
            canary = Context().run(asyncio.ensure_future, canaries)
            self._canaries.add(canary)
            canary.add_done_callback(self._canaries.discard)

    async def _send_canaries(self, replica: Replica, model: str, *, unreachable: bool) -> None:
        """Ask for a token until the replica answers, then let it serve requests again."""
        try:
            while not await self._canary(replica, model, unreachable=unreachable):
                pass
        finally:
            replica.excluded.discard(_ALL if unreachable else model)

    async def _canary(self, replica: Replica, model: str, *, unreachable: bool) -> bool:
        await asyncio.sleep(health.BACK_EVERY)
        # A gRPC channel waits longer and longer before it reconnects.
        client = _connect(replica.url) if unreachable else replica.client
        try:
            await health.ask_for_token(client, model, health.BACK_WITHIN)
        except LLMServeError as error:
            if health.finding(error) in (health.Finding.DIED, health.Finding.SILENT):
                if unreachable:
                    await client.close()
                return False
        if unreachable:
            # Requests that were sent to the replica all the same may still use the old client.
            self._old_clients.append(replica.client)
            replica.client = client
        return True


def _connect(url: str) -> AsyncClient:
    # The gateway has one place for the templates of all replicas.
    return connect_async(url, places_tools=False)


async def _gather(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results that arrive in time, or the late ones if none does."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        done, late = await asyncio.wait(tasks, timeout=_GATHER_SECONDS)
        if late and all([task.exception() for task in done]):
            done |= (await asyncio.wait(late))[0]
    finally:
        for task in tasks:
            task.cancel()
    errors = [error for task in done if (error := task.exception())]
    if len(errors) == len(done):
        raise errors[0]
    return [task.result() for task in done if not task.exception()]


def is_replica_failure(error: LLMServeError) -> bool:
    """Return whether the replica failed, rather than the request."""
    unavailable = isinstance(error, (UnreachableError, ModelNotReadyError))
    return unavailable or health.finding(error) is health.Finding.DIED


def session_hash(model: str, session: str, options: Mapping[str, Any]) -> bytes:
    """Return a hash of a session's name, "" for none: it names no other key's, nor a prompt."""
    if not session:
        return b""
    content = json.dumps([model, options.get(CACHE_SALT), session])
    return blake2b(content.encode(), digest_size=8, person=b"session").digest()


def blocks(model: str, prompt: str, options: Mapping[str, Any]) -> list[bytes]:
    """Return a hash of each leading block of a prompt and all before it; one if it is short."""
    ids, messages = options.get("input_ids"), options.get("messages")
    if messages:
        content = json.dumps([options.get("chat_template_kwargs"), messages]).encode()
    else:
        content = json.dumps(ids).encode() if ids else prompt.encode(errors="replace")
    prefix_hash = blake2b(model.encode() + b"\0", digest_size=8)
    if len(content) < _BLOCK:
        prefix_hash.update(content)
        return [prefix_hash.digest()]
    hashes = []
    for start in range(0, min(len(content) - _BLOCK + 1, _BLOCK * _MAX_BLOCKS), _BLOCK):
        prefix_hash.update(content[start : start + _BLOCK])
        hashes.append(prefix_hash.digest())
    return hashes
