"""One request: sent as bytes that were made before, its answer kept as bytes until later.

Nothing is parsed while the clock runs: what a load generator computes, it takes from the server
on the same machine, and from the precision of its own clock. Only a sequence, which must read an
answer to know how to go on, is read at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.client.exchange import Exchange, open_exchange
from llmserve.client.results import Piece
from llmserve.errors import ClientError
from llmserve.measure.job import Ask, Job

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_END: Any = vars(grpc.aio)["EOF"]
ENDING_PATIENCE = 10.0


@dataclass
class Asked:
    """What happened to a request; times are those of the monotonic clock."""

    ask: Ask
    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    pieces: list[tuple[float, Piece]] = field(default_factory=list)
    code: str | None = None
    details: str = ""
    failure: ClientError | None = None


class Asker:
    """Sends the requests of a job over one connection."""

    def __init__(self, job: Job) -> None:
        place = job.place
        self._job = job
        endpoint = Endpoint.make(
            place.url,
            tls=place.tls,
            root_certificates=place.root_certificates,
            headers=place.headers,
        )
        self._metadata = endpoint.metadata
        self._channel = endpoint.open(grpc.aio)
        # A stream of one request is the same on the wire whichever way it is called, and this
        # one needs no task to feed it.
        self._stream = self._channel.unary_stream(f"/{_SERVICE}/ModelStreamInfer")
        self._unary = self._channel.unary_unary(f"/{_SERVICE}/ModelInfer")
        self._made: dict[int, bytes] = {}
        if job.model.exchange != "sequence":
            for ask in job.asks:
                self._made[ask.index] = self._bytes(ask)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._channel.close()

    async def ask(self, ask: Ask, scheduled: float) -> Asked:
        """Send a request and note what comes, and when."""
        asked = Asked(ask, scheduled)
        way = {"unary": self._whole, "stream": self._pieces, "sequence": self._steps}
        try:
            await way[self._job.model.exchange](asked)
        except grpc.aio.AioRpcError as error:
            asked.code, asked.details = error.code().name, error.details() or ""
        except ClientError as error:
            asked.failure = error
        if asked.code or asked.failure or not asked.ended:
            asked.ended = time.monotonic()
        return asked

    async def _whole(self, asked: Asked) -> None:
        raw = self._raw(asked.ask)
        asked.sent = time.monotonic()
        answer = await self._unary(raw, timeout=self._job.timeout, metadata=self._metadata)
        asked.ended = time.monotonic()
        asked.arrivals.append((asked.ended, answer))

    async def _pieces(self, asked: Asked) -> None:
        raw = self._raw(asked.ask)
        arrivals = asked.arrivals
        asked.sent = time.monotonic()
        call = self._stream(raw, timeout=self._job.timeout, metadata=self._metadata)
        # Reading like this costs a tenth less than ``async for``.
        while (message := await call.read()) is not _END:
            arrivals.append((time.monotonic(), message))
        asked.ended = arrivals[-1][0] if arrivals else time.monotonic()

    async def _steps(self, asked: Asked) -> None:
        exchange = self._exchange(asked.ask)
        end = None if self._job.timeout is None else time.monotonic() + self._job.timeout
        asked.sent = time.monotonic()
        try:
            while requests := exchange.next_round():
                left = None if end is None else max(0.0, end - time.monotonic())
                raw = requests[0].SerializeToString()
                answer = await self._unary(raw, timeout=left, metadata=self._metadata)
                came = time.monotonic()
                response = service_pb2.ModelInferResponse.FromString(answer)
                asked.pieces += [(came, piece) for piece in exchange.take(response)]
                asked.ended = came
        finally:
            for request in exchange.endings():
                # Not awaited: the state is freed behind the answer, and nobody waits for it.
                self._unary(
                    request.SerializeToString(), timeout=ENDING_PATIENCE, metadata=self._metadata
                )

    def _raw(self, ask: Ask) -> bytes:
        return self._made.get(ask.index) or self._bytes(ask)

    def _bytes(self, ask: Ask) -> bytes:
        request = self._exchange(ask).next_round()[0]
        raw: bytes = request.SerializeToString()
        return raw

    def _exchange(self, ask: Ask) -> Exchange:
        return open_exchange(self._job.model, [ask.prompt], ask.options, pieces=self._job.stream)
