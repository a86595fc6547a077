"""The client for asyncio: the verbs of :mod:`llmserve.client.sync`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, overload

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.client.connection import Connection
from llmserve.client.deadline import CLOSING_WAIT, ENDING_PATIENCE, ENDING_WAIT, PATIENCE, Deadline
from llmserve.client.exchange import Exchange, Steps, open_exchange
from llmserve.client.failures import translate, unknown_model
from llmserve.client.model import ModelInfo, ModelState, read_config, read_index, ready_names
from llmserve.client.options import check_options
from llmserve.client.results import Completion, Piece, gather
from llmserve.client.wire import is_last, read_response
from llmserve.errors import (
    ClientError,
    ModelNotReadyError,
    RequestTimeoutError,
    UnreachableError,
)


class AsyncClient(Connection):
    """A Triton and its models for one event loop; cancelling a task cancels its request."""

    def __init__(self, endpoint: Endpoint, *, timeout: float | None = None) -> None:
        # The channel is opened at the first call: it belongs to the loop that runs then.
        super().__init__(grpc.aio, endpoint, timeout)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is under way and let go of the connection."""
        for exchange in list(self._live):
            await self._finish(exchange)
        self._closed = True
        if self._endings:
            await asyncio.wait(self._endings, timeout=CLOSING_WAIT)
        if self._channel is not None:
            await self._channel.close()

    async def server_ready(self) -> bool:
        """Say whether a server answers and is ready."""
        try:
            return bool((await self._ask("ServerReady", service_pb2.ServerReadyRequest())).ready)
        except (UnreachableError, RequestTimeoutError):
            return False

    async def model_ready(self, name: str) -> bool:
        """Say whether a server answers and has the model loaded."""
        request = service_pb2.ModelReadyRequest(name=name)
        try:
            return bool((await self._ask("ModelReady", request)).ready)
        except (UnreachableError, RequestTimeoutError):
            return False

    async def index(self) -> list[ModelState]:
        """List every model in the server's repository with its state."""
        return read_index(await self._ask("RepositoryIndex", service_pb2.RepositoryIndexRequest()))

    async def models(self) -> list[str]:
        """List the names of the models that are ready."""
        return ready_names(await self.index())

    async def model(self, name: str) -> ModelInfo:
        """Say how a model wants to be asked; read once, then remembered."""
        return await self._info(name, self._deadline(None))

    @overload
    async def generate(
        self, model: str, prompt: str = "", *, timeout: float | None = None, **options: Any
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        model: str,
        prompt: list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    async def generate(
        self,
        model: str,
        prompt: str | list[str] | tuple[str, ...] = "",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Answer a prompt, or each of several; see :meth:`llmserve.client.Client.generate`."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        deadline = self._deadline(timeout)
        exchange = open_exchange(await self._info(model, deadline), prompts, options, pieces=False)
        pieces = [piece async for piece in self._run(exchange, deadline)]
        answers = gather(pieces, len(prompts))
        return answers[0] if isinstance(prompt, str) else answers

    async def stream(
        self,
        model: str,
        prompt: str | list[str] | tuple[str, ...] = "",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[Piece, None]:
        """Give an answer piece by piece; a model that cannot stream gives one piece.

        Leaving the loop early cancels the request; ``contextlib.aclosing`` makes sure of when.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        deadline = self._deadline(timeout)
        exchange = open_exchange(await self._info(model, deadline), prompts, options, pieces=True)
        async with aclosing(self._run(exchange, deadline, only_news=True)) as pieces:
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def sequence(
        self, model: str, *, timeout: float | None = None
    ) -> AsyncIterator[AsyncSequence]:
        """Go through a sequence step by step; leaving the ``async with`` block ends it."""
        deadline = self._deadline(timeout)
        steps = Steps(await self._info(model, deadline))
        self._live.add(steps)
        try:
            yield AsyncSequence(self, steps, deadline)
        finally:
            await self._finish(steps)

    async def _ask(self, method: str, request: Any, deadline: Deadline | None = None) -> Any:
        deadline = deadline or self._deadline(None)
        seconds = PATIENCE if deadline.seconds is None else deadline.left()
        async with self._telling(getattr(request, "name", None), deadline):
            return await self._call(method, request, seconds)

    async def _info(self, name: str, deadline: Deadline) -> ModelInfo:
        if name not in self._infos:
            request = service_pb2.ModelConfigRequest(name=name)
            answer = await self._ask("ModelConfig", request, deadline)
            self._infos[name] = read_config(answer.config)
        return self._infos[name]

    async def _run(
        self, exchange: Exchange, deadline: Deadline, *, only_news: bool = False
    ) -> AsyncGenerator[Piece, None]:
        answer = self._stream if exchange.info.exchange == "stream" else self._unary
        self._live.add(exchange)
        try:
            async with self._telling(exchange.info.name, deadline):
                while requests := exchange.next_round():
                    async with aclosing(answer(requests, deadline)) as responses:
                        async for response in responses:
                            for piece in exchange.take(response):
                                if piece.is_news or not only_news:
                                    yield piece
        finally:
            await self._finish(exchange)

    async def _unary(self, requests: list[Any], deadline: Deadline) -> AsyncGenerator[Any, None]:
        calls = [self._call("ModelInfer", request, deadline.left()) for request in requests]
        try:
            for call in calls:
                yield await call
        finally:
            for call in calls:
                call.cancel()

    async def _stream(self, requests: list[Any], deadline: Deadline) -> AsyncGenerator[Any, None]:
        # One stream carries all requests; closing our side lets the server end it when done.
        call = self._call("ModelStreamInfer", iter(requests), deadline.left())
        try:
            async for message in call:
                if message.error_message:
                    if len(requests) == 1 and is_last(message):
                        # Cancelling what has just ended can make Triton 2.51 lose a request.
                        async for _ in call:
                            pass
                    model = requests[0].model_name
                    raise translate("", message.error_message, self._where(model, deadline))
                yield message.infer_response
        finally:
            call.cancel()

    def _call(self, method: str, request: Any, seconds: float | None) -> Any:
        call = self._method(method)
        return call(request, timeout=seconds, metadata=self._endpoint.metadata)

    async def _finish(self, exchange: Exchange | Steps) -> None:
        """Free a model's state; what was asked has been answered or has failed already."""
        self._live.discard(exchange)
        if not self._closed and (requests := exchange.endings()):
            calls = [self._call("ModelInfer", end, ENDING_PATIENCE) for end in requests]
            # Tasks of their own, so that cancelling this one cannot keep the ends back.
            ends = [asyncio.ensure_future(_arrival(call)) for call in calls]
            for end in ends:
                self._endings.add(end)
                end.add_done_callback(self._endings.discard)
            await asyncio.wait(ends, timeout=ENDING_WAIT)

    @asynccontextmanager
    async def _telling(self, model: str | None, deadline: Deadline) -> AsyncIterator[None]:
        """Raise what goes wrong as an error of llmserve that names the mend."""
        try:
            yield
        except (grpc.RpcError, ClientError) as error:
            failure = self._failure(error, model, deadline)
            if model and isinstance(failure, ModelNotReadyError):
                with suppress(ClientError):
                    failure = unknown_model(model, await self.index())
            raise failure from None


async def _arrival(call: Any) -> None:
    with suppress(grpc.RpcError):
        await call


class AsyncSequence:
    """A sequence that the model keeps the state of; made by :meth:`AsyncClient.sequence`."""

    def __init__(self, client: AsyncClient, steps: Steps, deadline: Deadline) -> None:
        self._client = client
        self._steps = steps
        self._deadline = deadline

    async def send(self, text: str = "", **options: Any) -> Piece:
        """Take a step: the first starts the sequence, each gives the next piece."""
        request = self._steps.step(text, check_options(options))
        async with (
            self._client._telling(self._steps.info.name, self._deadline),
            aclosing(self._client._unary([request], self._deadline)) as responses,
        ):
            async for response in responses:
                for piece in read_response(response, 1):
                    return piece
        return Piece("")
