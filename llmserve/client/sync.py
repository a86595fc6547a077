"""The blocking client: the asyncio client, run without an event loop.

Its channel blocks where the asyncio channel awaits, so the coroutines of the client never suspend
and run to completion at once.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, overload

import grpc
from tritonclient.grpc import service_pb2_grpc

from llmserve.client.aio import AsyncChannel, AsyncClient, AsyncSequence
from llmserve.client.deadlines import Deadline, Timeout
from llmserve.client.model import ModelInfo, ModelState
from llmserve.client.results import Completion, F, Piece, Prompt, Prompts
from llmserve.client.url import Endpoint
from llmserve.client.values import Computed, Labels, Ranked

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


class Client:
    """A client of one Triton, created by :func:`llmserve.connect`; threads may share it."""

    def __init__(self, endpoint: Endpoint, *, timeout: Timeout = None) -> None:
        self._client = AsyncClient(endpoint, timeout=timeout, channel=BlockingChannel(endpoint))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel requests in flight and close the connection."""
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

    def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        """Describe how a model accepts requests; cached, and read again with ``refresh``."""
        return _run(self._client.model(name, refresh=refresh))

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
        r"""Return the whole answer to a prompt, or to each of several prompts.

        ``timeout`` is in seconds for the whole request, or :class:`Timeouts` for its parts;
        ``queue_timeout`` limits the time in the queue, if the model allows it. Options are those of
        the model, such as ``max_tokens=64``, ``temperature=0.7``, ``stop_words=["\n"]`` or
        ``messages=[...]``. With messages, ``tools=[...]``, ``tool_choice`` and
        ``parallel_tool_calls`` are as in OpenAI's API, and the answer has ``tool_calls``.
        """
        return _run(self._client._generate(model, prompt, timeout, options))

    def parse(
        self, model: str, prompt: str, form: type[F], *, timeout: Timeout = None, **options: Any
    ) -> F:
        """Return the answer as an instance of a pydantic model, constrained to its schema.

        An answer that ``max_tokens`` truncates is an error.
        """
        return _run(self._client.parse(model, prompt, form, timeout=timeout, **options))

    def compute(
        self,
        model: str,
        texts: Prompts,
        *,
        pairs: Prompts | None = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> Computed:
        """Return what a model computes of each text: its outputs as arrays, by name.

        This is for models that answer with values instead of text, whatever their task. ``pairs``
        are second texts, one for each, for a model that reads two.
        """
        return _run(self._client.compute(model, texts, pairs=pairs, timeout=timeout, **options))

    def embed(
        self, model: str, text: Prompt, *, timeout: Timeout = None, **options: Any
    ) -> npt.NDArray[np.float32]:
        """Return the embedding of a text, or an array with a row for each of several.

        Options are ``dimensions=N``, ``normalize=True``, ``truncate=True`` and, of models that
        have prompts of their own, ``prompt_name="query"``.
        """
        return _run(self._client.embed(model, text, timeout=timeout, **options))

    def rerank(
        self, model: str, query: str, documents: Prompts, *, timeout: Timeout = None, **options: Any
    ) -> list[Ranked]:
        """Return documents in the order in which they fit a query, the best first."""
        return _run(self._client.rerank(model, query, documents, timeout=timeout, **options))

    def classify(
        self,
        model: str,
        texts: Prompts,
        *,
        pairs: Prompts | None = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> list[Labels]:
        """Return the labels of each text, or of each pair, with their probabilities."""
        return _run(self._client.classify(model, texts, pairs=pairs, timeout=timeout, **options))

    def stream(
        self, model: str, prompt: Prompt = "", *, timeout: Timeout = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Yield an answer in pieces as they arrive; a model that cannot stream gives one piece.

        Leaving the loop early, or closing the iterator, cancels the request.
        """
        # Not inside the generator, so that an invalid call raises where it is made.
        return _iterate(_run(self._client._open_stream(model, prompt, timeout, options)))

    @contextmanager
    def sequence(self, model: str, *, timeout: Timeout = None) -> Iterator[Sequence]:
        """Start a sequence of requests with state; leaving the ``with`` block ends it."""
        sequence = self._client.sequence(model, timeout=timeout)
        steps = _run(sequence.__aenter__())
        try:
            yield Sequence(steps)
        finally:
            _run(sequence.__aexit__(None, None, None))


class Sequence:
    """A sequence whose state the model keeps; created by :meth:`Client.sequence`."""

    def __init__(self, steps: AsyncSequence) -> None:
        self._steps = steps

    def send(self, text: str = "", **options: Any) -> Piece:
        """Send a step and return the next piece; the first step starts the sequence."""
        return _run(self._steps.send(text, **options))


class BlockingChannel(AsyncChannel):
    """A channel of gRPC's blocking API, whose coroutines never suspend."""

    shares = False

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
    """Run a coroutine that awaits only coroutines of a :class:`BlockingChannel`."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("the blocking client awaited an event loop")


def _iterate(pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
    try:
        with suppress(StopAsyncIteration):
            while True:
                piece = _run(pieces.__anext__())
                if piece.is_news:
                    yield piece
    finally:
        _run(pieces.aclose())
