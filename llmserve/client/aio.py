"""The asyncio client. It contains all of the client's logic; the blocking client runs it too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, overload

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.client.deadlines import Deadline, Timeout
from llmserve.client.exchange import (
    AtOnce,
    Exchange,
    Steps,
    open_exchange,
    refuse_other_task,
)
from llmserve.client.failures import (
    Recipient,
    cut_off,
    from_rpc,
    http_address,
    may_be_http,
    speaks_http,
    translate,
    unknown_model,
)
from llmserve.client.messages import check_options, is_last, read_response
from llmserve.client.model import ModelInfo, ModelState, read_config, read_index, ready_names
from llmserve.client.results import Completion, F, Piece, Prompt, Prompts, gather, parse, schema_of
from llmserve.client.shared_streams import Inbox, SharedStream
from llmserve.client.tools.calls import read_calls, stream_calls
from llmserve.client.tools.request import Tools, apply_tools
from llmserve.client.url import Endpoint
from llmserve.client.values import (
    Computed,
    Labels,
    Ranked,
    labels,
    output_of,
    ranked,
    read_values,
    value_requests,
)
from llmserve.contract.shared_stream import SharedPiece
from llmserve.contract.tasks import CLASSIFY, EMBED, RERANK
from llmserve.contract.tensors import EMBEDDING
from llmserve.errors import (
    ClientError,
    InvalidRequestError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from llmserve.client.tools.formats import ToolFormats
    from llmserve.client.tools.parts import NewReader

QUICK_SECONDS = 10.0
"""The timeout of requests that a server answers at once, if the caller sets none."""
END_SECONDS = 60.0
"""How long the end of a sequence may wait on the server, behind the step before it."""
END_GRACE = 0.25
"""How long the client waits for it: long enough to send it, too short to break a deadline."""
CLOSE_SECONDS = 5.0
"""How long closing a client waits for the ends of sequences."""
CALL_HEADERS: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("call_headers", default=())
"""Headers of all asyncio calls in this context, besides those of the connection."""


class AsyncChannel:
    """A channel of gRPC's asyncio API, opened on the first call, in the event loop of that call."""

    shares = True
    """Whether it can read a shared stream beside other calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._grpc: Any = None
        self._stub: Any = None
        self._settling: set[asyncio.Future[None]] = set()

    def unary(self, method: str, request: Any, seconds: float | None) -> Any:
        headers = (*self._endpoint.metadata, *CALL_HEADERS.get())
        return self._method(method)(request, timeout=seconds, metadata=headers)

    def stream(self, requests: list[Any], seconds: float | None) -> Any:
        return self.unary("ModelStreamInfer", iter(requests), seconds)

    async def result(self, call: Any) -> Any:
        return await call

    async def read(self, stream: Any, seconds: float | None = None) -> Any:
        """Wait for the next message of a stream; None at its end."""
        # See workarounds.LEAKING_READ.
        reading = asyncio.ensure_future(stream.read())
        try:
            message = await asyncio.wait_for(asyncio.shield(reading), seconds)
        except (asyncio.CancelledError, asyncio.TimeoutError):
            if not reading.done():
                stream.cancel()
                self._keep(asyncio.ensure_future(_wait_for(reading)))
            raise
        return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]

    async def settle(self, calls: list[Any], seconds: float) -> None:
        """Wait until calls are done, whether they fail or not, but at most this long."""
        # Separate tasks, so that cancelling this one does not cancel the calls.
        tasks = [asyncio.ensure_future(_wait_for(call)) for call in calls]
        for task in tasks:
            self._keep(task)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    async def close(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()

    def _keep(self, task: asyncio.Future[None]) -> None:
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _method(self, name: str) -> Any:
        if self._stub is None:
            self._grpc = self._endpoint.open(grpc.aio)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)
        return getattr(self._stub, name)


async def _wait_for(call: Any) -> None:
    with suppress(grpc.RpcError):
        await call


class AsyncClient:
    """A client of one Triton for one event loop; cancelling a task cancels its request."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout: Timeout = None,
        channel: AsyncChannel | None = None,
        places_tools: bool = True,
    ) -> None:
        self._address = endpoint.address
        self._channel = channel or AsyncChannel(endpoint)
        self._timeout = timeout
        self._infos: dict[str, ModelInfo] = {}
        self._templates: dict[str, str | None] = {}
        self._places_tools = places_tools
        self._closed = False
        self._streams: dict[str, SharedStream] = {}
        self._active: set[Exchange | Steps] = set()
        # Calls that end a sequence and are not done yet.
        self._ends: list[Any] = []

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for exchange in list(self._active):
            await self._finish(exchange)
        self._closed = True
        if calls := [call for stream in self._streams.values() for call in stream.close()]:
            await asyncio.wait(calls)
        await self._channel.settle(self._ends, CLOSE_SECONDS)
        await self._channel.close()

    async def server_ready(self) -> bool:
        return await self._is_ready("ServerReady", service_pb2.ServerReadyRequest())

    async def model_ready(self, name: str) -> bool:
        return await self._is_ready("ModelReady", service_pb2.ModelReadyRequest(name=name))

    async def index(self) -> list[ModelState]:
        request = service_pb2.RepositoryIndexRequest()
        return read_index(await self._request("RepositoryIndex", request))

    async def models(self) -> list[str]:
        return ready_names(await self._states())

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        return await self._info(name, self._deadline(None), refresh=refresh)

    @overload
    async def generate(
        self, model: str, prompt: str = "", *, timeout: Timeout = None, **options: Any
    ) -> Completion: ...

    @overload
    async def generate(
        self, model: str, prompt: Prompts, *, timeout: Timeout = None, **options: Any
    ) -> list[Completion]: ...

    async def generate(
        self, model: str, prompt: Prompt = "", *, timeout: Timeout = None, **options: Any
    ) -> Completion | list[Completion]:
        """Return whole answers; see :meth:`llmserve.client.Client.generate`."""
        return await self._generate(model, prompt, timeout, options)

    async def parse(
        self, model: str, prompt: str, form: type[F], *, timeout: Timeout = None, **options: Any
    ) -> F:
        """Return an instance of a pydantic model; see :meth:`llmserve.client.Client.parse`."""
        options["json_schema"] = schema_of(form)
        return parse(form, await self.generate(model, prompt, timeout=timeout, **options))

    async def compute(
        self,
        model: str,
        texts: Prompts,
        *,
        pairs: Prompts | None = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> Computed:
        """Return what a model computes of texts; see :meth:`llmserve.client.Client.compute`."""
        deadline = self._deadline(timeout)
        info = await self._info(model, deadline)
        requests = value_requests(info, texts, pairs, options)
        send = self._stream if info.exchange == "stream" else self._unary
        responses: dict[str, Any] = {}
        async with self._translated(model, deadline):
            async with aclosing(send(requests, deadline)) as answers:
                async for response in answers:
                    if response.outputs:
                        responses[response.id] = response
            return read_values([responses.get(request.id) for request in requests])

    async def embed(
        self, model: str, text: Prompt, *, timeout: Timeout = None, **options: Any
    ) -> npt.NDArray[np.float32]:
        """Return embeddings; see :meth:`llmserve.client.Client.embed`."""
        texts = [text] if isinstance(text, str) else text
        await self._check_task(model, EMBED)
        computed = await self.compute(model, texts, timeout=timeout, **options)
        vectors = output_of(computed, EMBEDDING.name)
        return vectors[0] if isinstance(text, str) else vectors

    async def rerank(
        self, model: str, query: str, documents: Prompts, *, timeout: Timeout = None, **options: Any
    ) -> list[Ranked]:
        """Return documents in order; see :meth:`llmserve.client.Client.rerank`."""
        await self._check_task(model, RERANK)
        queries = [query] * len(documents)
        computed = await self.compute(model, queries, pairs=documents, timeout=timeout, **options)
        return ranked(computed, documents)

    async def classify(
        self,
        model: str,
        texts: Prompts,
        *,
        pairs: Prompts | None = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> list[Labels]:
        """Return the labels of texts; see :meth:`llmserve.client.Client.classify`."""
        await self._check_task(model, CLASSIFY)
        return labels(await self.compute(model, texts, pairs=pairs, timeout=timeout, **options))

    async def _check_task(self, model: str, task: str) -> None:
        refuse_other_task(await self._info(model, self._deadline(None)), task)

    async def stream(
        self, model: str, prompt: Prompt = "", *, timeout: Timeout = None, **options: Any
    ) -> AsyncGenerator[Piece, None]:
        """Yield an answer in pieces as they arrive; a model that cannot stream gives one piece.

        Leaving the loop early cancels the request; with ``contextlib.aclosing``, immediately.
        """
        answers = await self._open_stream(model, prompt, timeout, options)
        async with aclosing(answers) as pieces:
            async for piece in pieces:
                if piece.is_news:
                    yield piece

    @asynccontextmanager
    async def sequence(
        self, model: str, *, timeout: Timeout = None
    ) -> AsyncIterator[AsyncSequence]:
        """Start a sequence of requests with state; leaving the ``async with`` block ends it."""
        deadline = self._deadline(timeout)
        steps = Steps(await self._info(model, deadline))
        self._active.add(steps)
        try:
            yield AsyncSequence(self, steps, deadline)
        finally:
            await self._finish(steps)

    async def _generate(
        self, model: str, prompt: Prompt, timeout: Timeout, options: dict[str, Any]
    ) -> Completion | list[Completion]:
        tools, deadline = Tools.of(options), self._deadline(timeout)
        new_reader = await self._readers(model, deadline, options, tools)
        exchange = await self._open(model, prompt, deadline, options, pieces=False)
        pieces = [piece async for piece in self._pieces(exchange, deadline)]
        answers = gather(pieces, 1 if isinstance(prompt, str) else len(prompt))
        if new_reader:
            parallel = tools is None or tools.parallel
            answers = [read_calls(new_reader(), answer, parallel=parallel) for answer in answers]
        return answers[0] if isinstance(prompt, str) else answers

    async def _open_stream(
        self, model: str, prompt: Prompt, timeout: Timeout, options: dict[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Return the pieces of a stream, in which the thinking is told from the answer."""
        deadline = self._deadline(timeout)
        new_reader = await self._readers(model, deadline, options, None)
        exchange = await self._open(model, prompt, deadline, options, pieces=True)
        pieces = self._pieces(exchange, deadline)
        count = 1 if isinstance(prompt, str) else len(prompt)
        return stream_calls(pieces, new_reader, count) if new_reader else pieces

    async def _readers(
        self, model: str, deadline: Deadline, options: dict[str, Any], tools: Tools | None
    ) -> NewReader | None:
        """Return what tells calls and thinking from the text of an answer, if anything does."""
        if not (self._places_tools and options.get("messages")):
            return None
        info = await self._info(model, deadline)
        return await self._formats_within(deadline).readers(info, tools, options)

    @cached_property
    def _formats(self) -> ToolFormats:
        # Parsers are plugins; most requests need none.
        from llmserve.client.tools.formats import ToolFormats

        return ToolFormats(self._template, prompt_of=self._prompt_of)

    def _formats_within(self, deadline: Deadline) -> ToolFormats:
        """Return the formats for a request: what they ask its model is a part of its time."""
        template = partial(self._template, deadline=deadline)
        return self._formats.asked_by(template, partial(self._prompt_of, deadline=deadline))

    async def _template(self, model: str, deadline: Deadline | None = None) -> str | None:
        """Return a model's chat template, None if the model does not report it."""
        if model not in self._templates:
            description = await self._described(model, {}, deadline)
            try:
                template = json.loads(description)["chat_template"]
            except (ValueError, KeyError, TypeError):
                template = None  # A model of another maker or version, which generated an answer.
            self._templates[model] = template if isinstance(template, str) else None
        return self._templates[model]

    async def _described(
        self, model: str, options: Mapping[str, Any], deadline: Deadline | None
    ) -> str:
        """Return what a model says of a prompt instead of an answer to it."""
        deadline = self._deadline(None) if deadline is None else deadline.anew()
        info = await self._info(model, deadline)
        asked = {**options, "prompt_only": True, "max_tokens": 1}
        exchange = open_exchange(info, [""], asked, pieces=False)
        return "".join([piece.text async for piece in self._pieces(exchange, deadline)])

    async def _prompt_of(
        self, model: str, options: Mapping[str, Any], deadline: Deadline | None = None
    ) -> str | None:
        """Return the prompt that a model makes of these options, nothing if it refuses them.

        None if it does not answer now, because it is full or starts again.
        """
        try:
            return str(json.loads(await self._described(model, options, deadline))["text"])
        except (InvalidRequestError, ValueError, KeyError, TypeError):
            return ""
        except RequestRejectedError:
            return None

    async def _with_tools(
        self, info: ModelInfo, options: dict[str, Any], deadline: Deadline
    ) -> dict[str, Any]:
        """Return a request's options in the form that the model accepts."""
        tools = Tools.of(options)
        model_options = apply_tools(options, tools)
        if not options.get("messages"):
            return model_options
        return await self._formats_within(deadline).place(info, model_options, tools)

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    async def _is_ready(self, method: str, request: Any) -> bool:
        try:
            return bool((await self._request(method, request)).ready)
        except (UnreachableError, RequestTimeoutError):
            return False

    async def _request(self, method: str, request: Any, deadline: Deadline | None = None) -> Any:
        deadline = deadline or self._deadline(None)
        if deadline.seconds is None:
            deadline = Deadline(QUICK_SECONDS)
        async with self._translated(getattr(request, "name", None), deadline):
            return await self._channel.result(self._call(method, request, deadline.left()))

    async def _info(self, name: str, deadline: Deadline, *, refresh: bool = False) -> ModelInfo:
        if refresh or name not in self._infos:
            request = service_pb2.ModelConfigRequest(name=name)
            response = await self._request("ModelConfig", request, deadline)
            info = read_config(response.config)
            if info.name != name:  # Triton reads a name up to its first NUL.
                raise unknown_model(name, await self._states())
            self._infos[name] = info
            self._templates.pop(name, None)
        return self._infos[name]

    async def _open(
        self, model: str, prompt: Prompt, deadline: Deadline, options: Any, *, pieces: bool
    ) -> Exchange:
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        info = await self._info(model, deadline)
        if self._places_tools:
            options = await self._with_tools(info, options, deadline)
        return open_exchange(info, prompts, options, pieces=pieces)

    async def _pieces(self, exchange: Exchange, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        send = self._stream if exchange.info.exchange == "stream" else self._unary
        self._active.add(exchange)
        try:
            async with self._translated(exchange.info.name, deadline):
                while requests := exchange.next_round():
                    if isinstance(exchange, AtOnce) and (shared := await self._shared(exchange)):
                        answers = self._previewed(exchange, requests, shared, deadline)
                        async with aclosing(answers) as pieces:
                            async for piece in pieces:
                                yield piece
                        continue
                    async with aclosing(send(requests, deadline)) as responses:
                        async for response in responses:
                            for piece in exchange.take(response):
                                yield piece
        finally:
            await self._finish(exchange)

    async def _shared(self, exchange: AtOnce) -> SharedStream | None:
        """Return the model's shared stream if it is open and can show these answers."""
        info = exchange.info
        if not (exchange.can_share and self._channel.shares):
            return None
        if info.name not in self._streams:
            self._streams[info.name] = SharedStream(self._open_channel(), info)
        stream = self._streams[info.name]
        # The model may have been built again.
        stream.info = info
        return stream if await stream.ready() else None

    async def _previewed(
        self, exchange: AtOnce, requests: list[Any], shared: SharedStream, deadline: Deadline
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces that arrive in a shared stream or in the requests' own responses."""
        with shared.listening(exchange.share(requests, shared.name)) as inbox:
            own = asyncio.ensure_future(self._collect(requests, deadline, inbox))
            try:
                while True:
                    for item in await inbox.take(deadline.part):
                        deadline.started = True
                        if isinstance(item, SharedPiece):
                            pieces = exchange.preview(item)
                        elif item is None:
                            return
                        elif isinstance(item, BaseException):
                            raise item
                        else:
                            pieces = exchange.take(item)
                            if pieces and not any(piece.finish_reason for piece in pieces):
                                shared.extend()
                        for piece in pieces:
                            yield piece
            finally:
                own.cancel()

    async def _collect(self, requests: list[Any], deadline: Deadline, inbox: Inbox) -> None:
        """Put the requests' own responses into an inbox, at the end None or the failure."""
        try:
            async with aclosing(self._stream(requests, deadline, parts=False)) as responses:
                async for response in responses:
                    inbox.put(response)
            inbox.put(None)
        # That the client was closed is a cancellation of the call.
        except (Exception, asyncio.CancelledError) as error:
            inbox.put(error)

    async def _unary(self, requests: list[Any], deadline: Deadline) -> AsyncGenerator[Any, None]:
        calls = [self._call("ModelInfer", request, deadline.next()) for request in requests]
        try:
            for call in calls:
                response = await self._channel.result(call)
                deadline.started = True
                yield response
        finally:
            for call in calls:
                call.cancel()

    async def _stream(
        self, requests: list[Any], deadline: Deadline, *, parts: bool = True
    ) -> AsyncGenerator[Any, None]:
        recipient = self._recipient(requests[0].model_name, deadline)
        unanswered = {request.id for request in requests}
        # One stream carries all requests. Our side then closes, so the server can end the stream.
        call = self._open_channel().stream(requests, deadline.left())
        try:
            while message := await self._channel.read(call, deadline.part if parts else None):
                deadline.started = deadline.started or parts
                if is_last(message):
                    unanswered.discard(message.infer_response.id)
                if message.error_message:
                    while len(requests) == 1 and is_last(message):
                        # See workarounds.LOST_REQUEST.
                        if await self._channel.read(call) is None:
                            break
                    raise translate("", message.error_message, recipient)
                yield message.infer_response
            if unanswered:
                raise cut_off(recipient)
        finally:
            call.cancel()

    def _open_channel(self) -> AsyncChannel:
        if self._closed:
            raise UsageError("this client is closed", hint="call connect() again")
        return self._channel

    def _call(self, method: str, request: Any, seconds: float | None) -> Any:
        return self._open_channel().unary(method, request, seconds)

    async def _finish(self, exchange: Exchange | Steps) -> None:
        """Free the state of a model; earlier requests have been answered or have failed."""
        self._active.discard(exchange)
        if not self._closed:
            requests = exchange.end_requests()
            ends = [self._call("ModelInfer", request, END_SECONDS) for request in requests]
            self._ends = [end for end in self._ends if not end.done()] + ends
            await self._channel.settle(ends, END_GRACE)

    def _recipient(self, model: str | None, deadline: Deadline) -> Recipient:
        message = deadline.timeout_message(repr(model) if model else str(self._address))
        return Recipient(str(self._address), model, message)

    @asynccontextmanager
    async def _translated(self, model: str | None, deadline: Deadline) -> AsyncIterator[None]:
        """Translate errors of gRPC into errors of llmserve."""
        try:
            yield
        except (asyncio.TimeoutError, TimeoutError):
            raise translate("DEADLINE_EXCEEDED", "", self._recipient(model, deadline)) from None
        except (grpc.RpcError, grpc.FutureCancelledError, ClientError) as error:
            if model:
                # The model may have been rebuilt.
                self._infos.pop(model, None)
                self._templates.pop(model, None)
            raise await self._explain(error, self._recipient(model, deadline)) from None

    async def _explain(self, error: Exception, recipient: Recipient) -> ClientError:
        failure = error if isinstance(error, ClientError) else from_rpc(error, recipient)
        if recipient.model and isinstance(failure, ModelNotReadyError):
            with suppress(ClientError):
                return unknown_model(recipient.model, await self._states())
        host, port = self._address.host, self._address.port
        if may_be_http(error) and await self._channel.run(speaks_http, host, port):
            return http_address(recipient)
        return failure

    async def _states(self) -> list[ModelState]:
        with suppress(ClientError):
            return await self.index()
        # `llmserve serve --model` restricts the index.
        response = await self._request("ModelStatistics", service_pb2.ModelStatisticsRequest())
        return [ModelState(stat.name, stat.version, "READY", "") for stat in response.model_stats]


class AsyncSequence:
    """A sequence whose state the model keeps; created by :meth:`AsyncClient.sequence`."""

    def __init__(self, client: AsyncClient, steps: Steps, deadline: Deadline) -> None:
        self._client = client
        self._steps = steps
        self._deadline = deadline

    async def send(self, text: str = "", **options: Any) -> Piece:
        request = self._steps.step(text, check_options(options))
        call = self._client._call("ModelInfer", request, self._deadline.next())
        async with self._client._translated(self._steps.info.name, self._deadline):
            response = await self._client._channel.result(call)
            pieces = read_response(response, 1, self._steps.info.answer)
        self._deadline.started = True
        return pieces[0] if pieces else Piece("")
