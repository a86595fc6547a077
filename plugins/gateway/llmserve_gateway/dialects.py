"""What an API has to say for itself, so that the gateway can answer in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from llmserve.client import ModelInfo, ToolFormats
from llmserve.runtime.contract import ADAPTER
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import Reads
from llmserve_gateway.keys import Key
from llmserve_gateway.model_names import Named
from llmserve_gateway.replicas import Replicas
from llmserve_gateway.reply import EVENTS, Reply, RequestRecord, StreamFormat
from llmserve_gateway.stored_responses import StoredResponse, StoredResponses
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.usage import Usage
from llmserve_gateway.value_requests import ValueRequest

AnyRequest = ParsedRequest | ValueRequest
R = TypeVar("R", bound=AnyRequest)
Truncate = Literal["ranking", "all", "none"]


@dataclass(frozen=True, eq=False)
class Models:
    """What requests are answered with."""

    client: Callable[[], Replicas]
    catalog: Catalog
    tools: ToolFormats
    truncate: Truncate
    """Of which requests texts that are too long are cut, if they say nothing of it."""
    responses: StoredResponses | None = None
    """What keeps responses, if any are."""


@dataclass(frozen=True, eq=False)
class Later:
    """What a client is told of a request that is answered in the background."""

    stored: StoredResponse
    body: bytes
    events: bytes
    """The same as the beginning of a stream."""


@dataclass(frozen=True, eq=False)
class Dialect(ABC, Generic[R]):
    """The request and response formats of one API."""

    read: Reads[R]
    operation: str
    """OpenTelemetry's name for it."""
    error_body: Callable[[ApiError], bytes] = ApiError.json
    streams_as: StreamFormat = EVENTS
    shows_images: bool = False
    """Whether its requests may have images, for which a body has more room."""

    def later(self, request: R, record: RequestRecord) -> Later | None:
        """Return what is answered at once, if nobody waits for the answer."""
        del request, record
        return None

    def unloaded(self, request: R, record: RequestRecord) -> bytes:
        """Return the answer to a request that only unloads its model, in an API that has such."""
        raise NotImplementedError

    async def settled(self, models: Models, key: Key | None, request: R) -> R:
        """Return a request with what it leaves to the gateway: its model, where that may be."""
        if request.model:
            return request
        return replace(request, model=await model_for(models, key, request.tasks))

    @abstractmethod
    def failure_of(self, request: R, record: RequestRecord) -> Callable[[ApiError], bytes]:
        """Return what writes an error within a stream that has sent nothing but comments."""

    @abstractmethod
    async def begin(
        self, models: Models, info: ModelInfo, request: R, reply: Reply, timeout: float | None
    ) -> tuple[Usage, Awaitable[None]]:
        """Return what counts an answer, and what asks the model for it and sends it."""


async def model_for(models: Models, key: Key | None, tasks: Sequence[str]) -> str:
    """Return the model of a request that names none, as the servers of its API have only one."""
    infos = await models.catalog.offered()
    fitting = [info for info in infos if info.task in tasks]
    first = [info for info in fitting if info.task == tasks[0]] or fitting
    names = [info.name for info in first if not (key and key.models) or info.name in key.models]
    if len(names) != 1:
        what = "there are several models for this" if names else "no model is for this"
        raise bad_request(f"{what}: send model", "model")
    return names[0]


def with_named(request: R, named: Named) -> R:
    """Return a request to the model, and its adapter, that the request has named."""
    if named == Named(request.model):
        return request
    called = replace(request, model=named.model, asked=request.called)
    if not named.adapter or not isinstance(called, ParsedRequest):
        return called
    return replace(
        called,
        options={**request.options, ADAPTER.name: named.adapter},
        sent={**request.sent, ADAPTER.name: "model"},
    )
