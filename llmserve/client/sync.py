"""The client for ordinary, blocking code: the asyncio client, run without a loop.

Its channel blocks where the other one waits, so a coroutine of the client never gives way and runs
to its end at once.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, overload

import grpc
from tritonclient.grpc import service_pb2_grpc

from llmserve.client.aio import AsyncChannel, AsyncClient, AsyncSequence
from llmserve.client.deadlines import Deadline, Timeout
from llmserve.client.model import ModelInfo, ModelState
from llmserve.client.results import Completion, F, Piece, Prompt, Prompts
from llmserve.client.url import Endpoint

T = TypeVar("T")


class Client:
    """A Triton and its models. Made by :func:`llmserve.connect`; threads may share it."""

    def __init__(self, endpoint: Endpoint, *, timeout: Timeout = None) -> None:
        self._client = AsyncClient(endpoint, timeout=timeout, channel=BlockingChannel(endpoint))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way and let go of the connection."""
        _run(self._client.close())

    def server_ready(self) -> bool:
        return _run(self._client.server_ready())

    def model_ready(self, name: str) -> bool:
        return _run(self._client.model_ready(name))

    def index(self) -> list[ModelState]:
        """List every model in the server's repository with its state."""
        return _run(self._client.index())

    def models(self) -> list[str]:
        return _run(self._client.models())

    def model(self, name: str, *, anew: bool = False) -> ModelInfo:
        """Say how a model takes requests; read once, then remembered, unless it is wanted anew."""
        return _run(self._client.model(name, anew=anew))

    @overload
    def generate(
        self, model: str, prompt: str = "", *, timeout: Timeout = None, **options: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, model: str, prompt: Prompts, *, timeout: Timeout = None, **options: Any
    ) -> list[Completion]: ...

    def generate(
        self, model: str, prompt: Prompt = "", *, timeout: Timeout = None, **options: Any
    ) -> Completion | list[Completion]:
        r"""Answer a prompt, or each of several prompts, as a whole.

        ``timeout`` is in seconds, over everything, or the :class:`Timeouts` of the request's parts;
        ``queue_timeout``, where a model allows it, is
        for the time until it is the request's turn. Options are those of the model, such as
        ``max_tokens=64``, ``temperature=0.7``, ``stop_words=["\n"]`` or ``messages=[...]``, with
        ``tools=[...]``, ``tool_choice`` and ``parallel_tool_calls`` as OpenAI has them: the
        answer's ``tool_calls`` are those that it makes.
        """
        return _run(self._client._generate(model, prompt, timeout, options))

    def parse(
        self, model: str, prompt: str, form: type[F], *, timeout: Timeout = None, **options: Any
    ) -> F:
        """Answer with an object of a pydantic model, whose schema the answer is held to.

        An answer that ``max_tokens`` cut short is an error, for it is no whole object.
        """
        return _run(self._client.parse(model, prompt, form, timeout=timeout, **options))

    def stream(
        self, model: str, prompt: Prompt = "", *, timeout: Timeout = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Give an answer piece by piece; a model that cannot stream gives one piece.

        Leaving the loop early, or closing the iterator, cancels the request.
        """
        # Here and not in the generator, so that a mistake shows where the call is written.
        opened = _run(self._client._open(model, prompt, timeout, options, pieces=True))
        return _drain(self._client._pieces(*opened))

    @contextmanager
    def sequence(self, model: str, *, timeout: Timeout = None) -> Iterator[Sequence]:
        """Go through a sequence step by step; leaving the ``with`` block ends it."""
        sequence = self._client.sequence(model, timeout=timeout)
        steps = _run(sequence.__aenter__())
        try:
            yield Sequence(steps)
        finally:
            _run(sequence.__aexit__(None, None, None))


class Sequence:
    """A sequence that the model keeps the state of; made by :meth:`Client.sequence`."""

    def __init__(self, steps: AsyncSequence) -> None:
        self._steps = steps

    def send(self, text: str = "", **options: Any) -> Piece:
        """Take a step: the first starts the sequence, each gives the next piece."""
        return _run(self._steps.send(text, **options))


class BlockingChannel(AsyncChannel):
    """A channel of gRPC's threads, whose coroutines block."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._grpc = endpoint.open(grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)

    def unary(self, method: str, request: Any, seconds: float | None) -> Any:
        call = getattr(self._stub, method).future
        return call(request, timeout=seconds, metadata=self._endpoint.metadata)

    def stream(self, requests: list[Any], seconds: float | None) -> Any:
        call = self._stub.ModelStreamInfer
        return call(iter(requests), timeout=seconds, metadata=self._endpoint.metadata)

    async def result(self, call: Any) -> Any:
        return call.result()

    async def read(self, stream: Any, seconds: float | None = None) -> Any:
        if seconds is None:
            return next(stream, None)
        timer = threading.Timer(seconds, stream.cancel)
        timer.start()
        try:
            return next(stream, None)
        except grpc.RpcError:
            if timer.finished.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    async def settle(self, calls: list[Any], seconds: float) -> None:
        deadline = Deadline(seconds)
        for call in calls:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=deadline.left())

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def close(self) -> None:
        self._grpc.close()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits only what a :class:`BlockingChannel` gives."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a blocking client has waited for an event loop")


def _drain(pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
    try:
        with suppress(StopAsyncIteration):
            while True:
                piece = _run(pieces.__anext__())
                if piece.is_news:
                    yield piece
    finally:
        _run(pieces.aclose())
