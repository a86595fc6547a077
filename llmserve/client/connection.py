"""What both clients keep: the channel, the models they know, the time they give."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2_grpc

from llmserve.client.channel import Endpoint
from llmserve.client.deadline import Deadline
from llmserve.client.exchange import Exchange, Steps
from llmserve.client.failures import Where, from_rpc
from llmserve.client.model import ModelInfo
from llmserve.errors import ClientError, UsageError


class Connection:
    """The part of a client that awaits nothing; ``api`` is ``grpc`` or ``grpc.aio``."""

    def __init__(self, api: Any, endpoint: Endpoint, timeout: float | None) -> None:
        self._api = api
        self._endpoint = endpoint
        self._timeout = timeout
        self._infos: dict[str, ModelInfo] = {}
        self._channel: Any = None
        self._stub: Any = None
        self._closed = False
        # Exchanges that are under way, and ends of sequences that have not arrived yet.
        self._live: set[Exchange | Steps] = set()
        self._endings: set[Any] = set()

    def _open(self) -> None:
        self._channel = self._endpoint.open(self._api)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _method(self, name: str) -> Any:
        if self._closed:
            raise UsageError("this client is closed", mend="call connect() again")
        if self._stub is None:
            self._open()
        return getattr(self._stub, name)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _where(self, model: str | None, deadline: Deadline) -> Where:
        return Where(str(self._endpoint.address), model, deadline.seconds)

    def _failure(self, error: Exception, model: str | None, deadline: Deadline) -> ClientError:
        """Say what went wrong; the model may have been built anew, so forget how it was."""
        if model:
            self._infos.pop(model, None)
        if isinstance(error, ClientError):
            return error
        return from_rpc(error, self._where(model, deadline))
