"""The load generator: a process of its own that does nothing but send and note.

``python -m llmserve.measure.loader`` reads a job as one line of JSON, warms up, says that it is
ready, starts when it is told when, and prints what it noted. Progress bars, statistics and the
rest live in the process that started it, so that they cannot disturb its clock. It ends when its
input does, so it never outlives whoever started it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from llmserve.client.channel import Endpoint
from llmserve.errors import LLMServeError, UnreachableError
from llmserve.measure.asking import Asked, Asker
from llmserve.measure.codec import decode, encode
from llmserve.measure.job import Ask, Job
from llmserve.measure.reading import failure_of, read
from llmserve.measure.summary import percentile
from llmserve.measure.wire import Cancel, DirectLoop, open_wire

LIBRARY = "LLMSERVE_BENCH_GRPC"
"""Set in the environment, it sends everything through gRPC's library."""
TELLING = 0.2
"""Seconds between two lines of progress."""
_DRAIN = 60.0
"""Seconds to wait, after a duration, for what is still under way."""
_PAUSE = 0.1
"""Seconds until a place of a closed loop asks again where nobody is: it must not run in circles."""
_NOBODY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""What may be said without a word from the server."""


class Loader:
    """Runs one job; what it notes is read when all is over."""

    def __init__(self, job: Job, asker: Asker) -> None:
        self._job = job
        self._asker = asker
        self._asked: list[Asked] = []
        self._lags: list[float] = []
        self._next = 0
        self._under_way: dict[int, tuple[float, Cancel]] = {}
        self._pauses = 0
        self._until = float("inf")
        loop = asyncio.get_running_loop()
        self._alarm: Callable[[float, Callable[[], None]], object] = (
            loop.direct.alarm if isinstance(loop, DirectLoop) else loop.call_at
        )
        self._over: asyncio.Future[None] = loop.create_future()
        self._gone: float | None = None
        self._given_up: str | None = None
        self._task: asyncio.Future[None] | None = None

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Warm up, wait for the start, run, and tell what happened."""
        _say(await self._warm_up())
        line = await orders.readline()
        if line:
            await self._measure(json.loads(line)["start"], orders)

    async def _warm_up(self) -> dict[str, Any]:
        waiting = list(self._job.warmup)
        asked: list[Asked] = []

        async def place() -> None:
            while waiting:
                asked.append(await self._asker.ask(waiting.pop(0), time.monotonic()))

        width = self._job.concurrency or 1
        await asyncio.gather(*(place() for _ in range(min(width, len(waiting)))))
        await self._asker.finish()
        failures = [failure for one in asked if (failure := failure_of(self._job, one))]
        if asked and len(failures) == len(asked):
            return _failed(failures[0])
        return {"ready": True}

    async def _measure(self, start: float, orders: asyncio.StreamReader) -> None:
        # What was made until now stays: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        load = self._task = asyncio.ensure_future(self._load(start))
        helpers = [
            asyncio.ensure_future(what) for what in (self._listen(orders, load), self._watch(start))
        ]
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        before = time.process_time()
        await asyncio.wait([load], timeout=self._patience())
        cpu = time.process_time() - before
        ended = time.monotonic()
        for task in (load, *helpers):
            task.cancel()
        await asyncio.wait([load])
        await self._asker.finish()
        if not load.cancelled() and (error := load.exception()):
            raise error
        self._report(start, cpu, ended)

    def _patience(self) -> float | None:
        """Say how long a load may take; without a duration its requests say that."""
        if self._job.concurrency is None or self._job.duration is None:
            return None
        return self._job.duration + _DRAIN

    async def _load(self, start: float) -> None:
        """Send everything; what is still under way when this ends or is cancelled is given up."""
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        if self._job.duration is not None:
            self._until = start + self._job.duration
        try:
            if self._job.concurrency is None:
                self._go_on(self._send_what_is_due, start)
            for _ in range(self._job.concurrency or 0):
                self._go_on(self._ask_again)
            await self._over
        finally:
            for _, cancel in self._under_way.values():
                cancel()

    def _ask_again(self) -> None:
        """Keep one request under way until there are no more, or the time is over."""
        now = time.monotonic()
        if now < self._until and (ask := self._take()) is not None:
            self._send(ask, now)

    def _take(self) -> Ask | None:
        asks = self._job.asks
        turn, at = divmod(self._next, len(asks))
        if turn and self._job.duration is None:
            return None
        self._next += 1
        if not turn:
            return asks[at]
        again = asks[at]
        return Ask(again.index + turn * self._job.total, again.prompt, again.options)

    def _send_what_is_due(self, start: float) -> None:
        """Send what is due by now, and come back when the next is."""
        asks = self._job.asks
        while self._next < len(asks):
            due = start + (asks[self._next].at or 0.0)
            if due > time.monotonic():
                self._alarm(due, partial(self._go_on, self._send_what_is_due, start))
                return
            self._next += 1
            self._send(asks[self._next - 1], due)

    def _send(self, ask: Ask, scheduled: float) -> None:
        now = time.monotonic()
        self._under_way[ask.index] = now, self._asker.begin(ask, scheduled, self._note)

    def _note(self, asked: Asked) -> None:
        """Note an answer and go on, where it was read: no task has to wake up for it."""
        del self._under_way[asked.ask.index]
        self._asked.append(asked)
        self._go_on(self._after, asked)

    def _after(self, asked: Asked) -> None:
        self._look_whether_gone(asked)
        if self._job.concurrency is None:
            self._lags.append(asked.sent - asked.scheduled)
        elif self._gone is None:
            self._ask_again()
        else:
            self._pauses += 1
            asyncio.get_running_loop().call_later(_PAUSE, self._go_on, self._resume)

    def _resume(self) -> None:
        self._pauses -= 1
        self._ask_again()

    def _go_on(self, step: Callable[..., None], *args: Any) -> None:
        """Take a step, and end the load with the last one.

        What fails in it must not reach who called: what reads the connection has nothing to do
        with it, and the loop would only log it.
        """
        try:
            step(*args)
            unsent = self._job.concurrency is None and self._next < len(self._job.asks)
            if not (self._under_way or self._pauses or unsent or self._over.done()):
                self._over.set_result(None)
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)

    def _look_whether_gone(self, asked: Asked) -> None:
        """Note since when there is no server, and end the load when that lasts."""
        if asked.code not in _NOBODY:
            self._gone = None
        elif isinstance(failure_of(self._job, asked), UnreachableError):
            if self._gone is None:
                self._gone = asked.ended
            if asked.ended - self._gone > self._job.give_up and self._task is not None:
                self._given_up = str(failure_of(self._job, asked))
                self._task.cancel()

    async def _listen(self, orders: asyncio.StreamReader, load: asyncio.Future[None]) -> None:
        """Stop at any word, and at the end of the input."""
        await orders.readline()
        load.cancel()

    async def _watch(self, start: float) -> None:
        """Tell how far it is, and notice how late this process comes to what is due.

        Both at once, and seldom: to wake up for nothing else costs more than a dozen pieces.
        """
        due = start
        while True:
            due = max(due + TELLING, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            at = time.monotonic()
            self._lags.append(at - due)
            _say({"done": len(self._asked), "at": at - start})

    def _report(self, start: float, cpu: float, ended: float) -> None:
        found = [read(self._job, asked, start) for asked in self._asked]
        _say(
            {
                "records": [encode(one.record) for one in found],
                "texts": {one.record.index: one.texts for one in found if one.texts},
                "cpu": cpu,
                "busy": cpu / max(1e-9, ended - start),
                "late": percentile(sorted(self._lags), 0.99) if self._lags else 0.0,
                "cut": [sent - start for sent, _ in self._under_way.values()],
                "gone": None if self._gone is None else self._gone - start,
                "given_up": self._given_up,
                "wire": self._asker.wire.name,
                "seconds": ended - start,
            }
        )


def _failed(error: LLMServeError) -> dict[str, Any]:
    return {"failed": type(error).__name__, "problem": error.problem, "mend": error.mend}


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


async def _main(loop: DirectLoop) -> None:
    orders = asyncio.StreamReader(limit=1 << 31)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    job = decode(Job, json.loads(await orders.readline()))
    place = job.place
    endpoint = Endpoint.make(
        place.url,
        tls=place.tls,
        root_certificates=place.root_certificates,
        headers=place.headers,
    )
    wire = await open_wire(endpoint, plain=not os.environ.get(LIBRARY), selector=loop.direct)
    try:
        await Loader(job, Asker(job, wire)).run(orders)
    except LLMServeError as error:
        _say(_failed(error))
    finally:
        await wire.close()


def main() -> None:
    """Run one job on a loop whose timers are finer than the millisecond of epoll's."""
    loop = DirectLoop()
    try:
        loop.run_until_complete(_main(loop))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
