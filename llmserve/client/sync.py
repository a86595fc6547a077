"""The client for ordinary, blocking code."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from types import TracebackType
from typing import Any, overload

import grpc
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


class Client(Connection):
    """A Triton and its models. Made by :func:`llmserve.connect`; threads may share it."""

    def __init__(self, endpoint: Endpoint, *, timeout: float | None = None) -> None:
        super().__init__(grpc, endpoint, timeout)
        self._open()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way and let go of the connection."""
        for exchange in list(self._live):
            self._finish(exchange)
        self._closed = True
        self._await(list(self._endings), CLOSING_WAIT)
        self._channel.close()

    def server_ready(self) -> bool:
        """Say whether a server answers and is ready."""
        try:
            return bool(self._ask("ServerReady", service_pb2.ServerReadyRequest()).ready)
        except (UnreachableError, RequestTimeoutError):
            return False

    def model_ready(self, name: str) -> bool:
        """Say whether a server answers and has the model loaded."""
        try:
            return bool(self._ask("ModelReady", service_pb2.ModelReadyRequest(name=name)).ready)
        except (UnreachableError, RequestTimeoutError):
            return False

    def index(self) -> list[ModelState]:
        """List every model in the server's repository with its state."""
        return read_index(self._ask("RepositoryIndex", service_pb2.RepositoryIndexRequest()))

    def models(self) -> list[str]:
        """List the names of the models that are ready."""
        return ready_names(self.index())

    def model(self, name: str) -> ModelInfo:
        """Say how a model wants to be asked; read once, then remembered."""
        return self._info(name, self._deadline(None))

    @overload
    def generate(
        self, model: str, prompt: str = "", *, timeout: float | None = None, **options: Any
    ) -> Completion: ...

    @overload
    def generate(
        self,
        model: str,
        prompt: list[str] | tuple[str, ...],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        model: str,
        prompt: str | list[str] | tuple[str, ...] = "",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        r"""Answer a prompt, or each of several prompts, as a whole.

        ``timeout`` is in seconds, over everything; ``queue_timeout``, where a model allows it, is
        for the time until it is the request's turn. Options are those of the model, such as
        ``max_tokens=64``, ``temperature=0.7``, ``stop_words=["\n"]`` or ``messages=[...]``.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        deadline = self._deadline(timeout)
        exchange = open_exchange(self._info(model, deadline), prompts, options, pieces=False)
        answers = gather(self._run(exchange, deadline), len(prompts))
        return answers[0] if isinstance(prompt, str) else answers

    def stream(
        self,
        model: str,
        prompt: str | list[str] | tuple[str, ...] = "",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Give an answer piece by piece; a model that cannot stream gives one piece.

        Leaving the loop early, or closing the iterator, cancels the request.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        deadline = self._deadline(timeout)
        # Here and not in the generator, so that a mistake shows where the call is written.
        exchange = open_exchange(self._info(model, deadline), prompts, options, pieces=True)
        return self._run(exchange, deadline, only_news=True)

    @contextmanager
    def sequence(self, model: str, *, timeout: float | None = None) -> Iterator[Sequence]:
        """Go through a sequence step by step; leaving the ``with`` block ends it.

        >>> def two_steps(client: Client) -> None:
        ...     with client.sequence("demo-steps") as steps:
        ...         print(steps.send("Programming", max_tokens=8).text, steps.send().text)
        """
        deadline = self._deadline(timeout)
        steps = Steps(self._info(model, deadline))
        self._live.add(steps)
        try:
            yield Sequence(self, steps, deadline)
        finally:
            self._finish(steps)

    def _ask(self, method: str, request: Any, deadline: Deadline | None = None) -> Any:
        deadline = deadline or self._deadline(None)
        seconds = PATIENCE if deadline.seconds is None else deadline.left()
        with self._telling(getattr(request, "name", None), deadline):
            return self._call(method, request, seconds).result()

    def _info(self, name: str, deadline: Deadline) -> ModelInfo:
        if name not in self._infos:
            answer = self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=name), deadline)
            self._infos[name] = read_config(answer.config)
        return self._infos[name]

    def _run(
        self, exchange: Exchange, deadline: Deadline, *, only_news: bool = False
    ) -> Generator[Piece, None, None]:
        answer = self._stream if exchange.info.exchange == "stream" else self._unary
        self._live.add(exchange)
        try:
            with self._telling(exchange.info.name, deadline):
                while requests := exchange.next_round():
                    with closing(answer(requests, deadline)) as responses:
                        for response in responses:
                            for piece in exchange.take(response):
                                if piece.is_news or not only_news:
                                    yield piece
        finally:
            self._finish(exchange)

    def _unary(self, requests: list[Any], deadline: Deadline) -> Generator[Any, None, None]:
        calls = [self._call("ModelInfer", request, deadline.left()) for request in requests]
        try:
            for call in calls:
                yield call.result()
        finally:
            for call in calls:
                call.cancel()

    def _stream(self, requests: list[Any], deadline: Deadline) -> Generator[Any, None, None]:
        # One stream carries all requests; closing our side lets the server end it when done.
        call = self._method("ModelStreamInfer")(
            iter(requests), timeout=deadline.left(), metadata=self._endpoint.metadata
        )
        try:
            for message in call:
                if message.error_message:
                    if len(requests) == 1 and is_last(message):
                        # Cancelling what has just ended can make Triton 2.51 lose a request.
                        for _ in call:
                            pass
                    model = requests[0].model_name
                    raise translate("", message.error_message, self._where(model, deadline))
                yield message.infer_response
        finally:
            call.cancel()

    def _call(self, method: str, request: Any, seconds: float | None) -> Any:
        call = self._method(method).future
        return call(request, timeout=seconds, metadata=self._endpoint.metadata)

    def _finish(self, exchange: Exchange | Steps) -> None:
        """Free a model's state; what was asked has been answered or has failed already."""
        self._live.discard(exchange)
        if not self._closed:
            ends = exchange.endings()
            calls = [self._call("ModelInfer", end, ENDING_PATIENCE) for end in ends]
            self._endings.update(calls)
            self._await(calls, ENDING_WAIT)

    def _await(self, calls: list[Any], seconds: float) -> None:
        waiting = Deadline(seconds)
        for call in calls:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=waiting.left())
            if call.done():
                self._endings.discard(call)

    @contextmanager
    def _telling(self, model: str | None, deadline: Deadline) -> Iterator[None]:
        """Raise what goes wrong as an error of llmserve that names the mend."""
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError, ClientError) as error:
            failure = self._failure(error, model, deadline)
            if model and isinstance(failure, ModelNotReadyError):
                with suppress(ClientError):
                    failure = unknown_model(model, self.index())
            raise failure from None


class Sequence:
    """A sequence that the model keeps the state of; made by :meth:`Client.sequence`."""

    def __init__(self, client: Client, steps: Steps, deadline: Deadline) -> None:
        self._client = client
        self._steps = steps
        self._deadline = deadline

    def send(self, text: str = "", **options: Any) -> Piece:
        """Take a step: the first starts the sequence, each gives the next piece."""
        request = self._steps.step(text, check_options(options))
        with self._client._telling(self._steps.info.name, self._deadline):
            for response in self._client._unary([request], self._deadline):
                for piece in read_response(response, 1):
                    return piece
        return Piece("")
