"""One request: sent as bytes that were made before, its answer kept as bytes until later.

Nothing is parsed while the clock runs: what a load generator computes, it takes from the server
on the same machine, and from the precision of its own clock. Only a sequence, which must read an
answer to know how to go on, is read at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tritonclient.grpc import service_pb2

from llmserve.client.exchange import Exchange, open_exchange
from llmserve.client.results import Piece
from llmserve.errors import ClientError
from llmserve.measure.job import Ask, Job
from llmserve.measure.wire import Arrivals, Broken, Cancel, Wire, begin, path_of

ENDING_PATIENCE = 10.0


@dataclass
class Asked:
    """What happened to a request; times are those of the monotonic clock."""

    ask: Ask
    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    arrivals: Arrivals = field(default_factory=list)
    pieces: list[tuple[float, Piece]] = field(default_factory=list)
    code: str | None = None
    details: str = ""
    failure: ClientError | None = None


class Asker:
    """Sends the requests of a job over one connection."""

    def __init__(self, job: Job, wire: Wire) -> None:
        self._job = job
        self.wire = wire
        self._infer, self._stream = path_of("ModelInfer"), path_of("ModelStreamInfer")
        self._endings: set[asyncio.Future[None]] = set()
        self._made: dict[int, bytes] = {}
        if job.model.exchange != "sequence":
            for ask in job.asks:
                self._made[ask.index] = self._bytes(ask)

    async def ask(self, ask: Ask, scheduled: float) -> Asked:
        """Send a request and note what comes, and when."""
        done: asyncio.Future[Asked] = asyncio.get_running_loop().create_future()
        self.begin(ask, scheduled, done.set_result)
        return await done

    def begin(self, ask: Ask, scheduled: float, done: Callable[[Asked], None]) -> Cancel:
        """Do the same without waiting for it; ``done`` hears of it unless it is cancelled."""
        asked = Asked(ask, scheduled)

        def ended(code: str, details: str) -> None:
            if code != "OK":
                asked.code, asked.details = code, details
            elif asked.arrivals:
                asked.ended = asked.arrivals[-1][0]
            if asked.code or asked.failure or not asked.ended:
                asked.ended = time.monotonic()
            done(asked)

        if self._job.model.exchange == "sequence":
            return begin(self._steps(asked), ended)
        path = self._stream if self._job.model.exchange == "stream" else self._infer
        raw = self._raw(ask)
        asked.sent = time.monotonic()
        return self.wire.begin(path, raw, self._job.timeout, asked.arrivals, ended)

    async def _steps(self, asked: Asked) -> None:
        exchange = self._exchange(asked.ask)
        end = None if self._job.timeout is None else time.monotonic() + self._job.timeout
        asked.sent = time.monotonic()
        # Until it has ended or was given up: only then it is known what there is to end.
        left_over = asyncio.get_running_loop().create_future()
        self._endings.add(left_over)
        try:
            while requests := exchange.next_round():
                left = None if end is None else max(0.001, end - time.monotonic())
                raw = requests[0].SerializeToString()
                arrivals: Arrivals = []
                await self.wire.call(self._infer, raw, left, arrivals)
                for came, answer in arrivals:
                    response = service_pb2.ModelInferResponse.FromString(answer)
                    asked.pieces += [(came, piece) for piece in exchange.take(response)]
                    asked.ended = came
        except ClientError as error:
            asked.failure = error
        finally:
            for request in exchange.endings():
                # Not awaited: the state is freed behind the answer, and nobody waits for it.
                end_of_it = asyncio.ensure_future(self._end(request.SerializeToString()))
                self._endings.add(end_of_it)
                end_of_it.add_done_callback(self._endings.discard)
            self._endings.discard(left_over)
            left_over.set_result(None)

    async def _end(self, raw: bytes) -> None:
        with suppress(Broken):
            await self.wire.call(self._infer, raw, ENDING_PATIENCE, [])

    async def finish(self) -> None:
        """Wait until the ends of sequences have arrived."""
        end = time.monotonic() + ENDING_PATIENCE
        while self._endings and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._endings, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _raw(self, ask: Ask) -> bytes:
        # A request that is repeated has a number of its own, and the same bytes.
        return self._made.get(ask.index % self._job.total) or self._bytes(ask)

    def _bytes(self, ask: Ask) -> bytes:
        request = self._exchange(ask).next_round()[0]
        raw: bytes = request.SerializeToString()
        return raw

    def _exchange(self, ask: Ask) -> Exchange:
        return open_exchange(self._job.model, [ask.prompt], ask.options, pieces=self._job.stream)
