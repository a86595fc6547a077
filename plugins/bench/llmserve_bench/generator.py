"""The load generator: processes that only send requests and record the times.

Progress, statistics and everything else stay in the process that started them, so that they do not
disturb the timing. A result reports how much of a core they used; ``--processes`` spreads the load.
"""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from llmserve.errors import ClientError, LLMServeError, UnreachableError
from llmserve.runtime.contract import ADAPTER
from llmserve_bench.figures import percentile
from llmserve_bench.prompts import Request
from llmserve_bench.results import GeneratorCost, Load, Record
from llmserve_bench.senders import Api, OpenAISender, Parts, Sender, TritonSender

OnProgress = Callable[[int, float], None]
_HEAD_START = 0.1
"""Seconds between the start message and the start, so that every process has read it."""
_TICK = 0.2
_GIVE_UP = 10.0
"""Seconds without a server after which a run ends; a restart may take some time."""
_RETRY = 0.1
"""Seconds before a closed loop tries again if there is no server."""
_DRAIN = 60.0
"""Seconds to wait, after a duration, for requests still in flight."""
_STOPPING = 15.0


@dataclass(frozen=True)
class LoadShare:
    """One process's share of a load; ``total`` is the number of requests of all shares."""

    url: str
    model: str
    api: Api
    cumulative: bool
    """Whether each piece counts the tokens of the answer so far, as our models do."""
    load: Load
    warmup: Sequence[Request]
    requests: Sequence[Request]
    total: int
    give_up: float = _GIVE_UP

    def split(self, processes: int) -> list[LoadShare]:
        """Split it so that all shares together send what one process would."""
        level = self.load.concurrency
        processes = min(processes, level or processes, len(self.requests))
        return [
            replace(
                self,
                load=replace(self.load, concurrency=level and len(range(share, level, processes))),
                warmup=self.warmup[share::processes],
                requests=self.requests[share::processes],
            )
            for share in range(processes)
        ]


@dataclass
class Report:
    """What one process recorded; ``lags`` are its delays behind the schedule, in seconds."""

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    given_up: str | None = None
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)
    interrupted: bool = False


class LoadGenerator:
    def __init__(self, shares: Iterable[LoadShare]) -> None:
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}
        for share in shares:
            pipe, far_end = Pipe()
            self._workers[pipe] = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as g; g.main({far_end.fileno()})"],
                pass_fds=[far_end.fileno()],
                # We handle Ctrl-C ourselves: the workers still have to report.
                start_new_session=True,
            )
            far_end.close()
            pipe.send(share)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, worker in self._workers.items():
            pipe.close()
            with suppress(subprocess.TimeoutExpired):
                worker.wait(2.0)
            worker.kill()
            worker.wait()

    def warm_up(self) -> None:
        """Wait until all are warm; raise an error if every request of a warm-up failed."""
        for pipe in self._workers:
            self._receive(pipe)

    def run(self, on_progress: OnProgress) -> tuple[float, list[Report]]:
        """Start all at the same moment and collect their reports; Ctrl-C ends them early."""
        start = time.monotonic() + _HEAD_START
        self._send_all(start)
        latest: dict[Connection, Any] = dict.fromkeys(self._workers, 0)
        """The last message of each worker: the number of requests done, or its report."""
        stopping = False
        while waiting := [pipe for pipe, last in latest.items() if not isinstance(last, Report)]:
            try:
                ready = wait(waiting, _STOPPING if stopping else None)
                if not ready:
                    raise LLMServeError("the load generator does not stop", hint="try again")
                latest |= {pipe: self._receive(pipe) for pipe in waiting if pipe in ready}
                counts = (len(x.records) if isinstance(x, Report) else x for x in latest.values())
                on_progress(sum(counts), time.monotonic() - start)
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                self._send_all("stop")
        for report in latest.values():
            report.interrupted = stopping
        return start, list(latest.values())

    def _send_all(self, message: object) -> None:
        for pipe in self._workers:
            with suppress(OSError):  # A dead worker is noticed when its report is read.
                pipe.send(message)

    def _receive(self, pipe: Connection) -> Any:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            code = self._workers[pipe].wait()
            message = LLMServeError(f"a load generator process died (exit code {code})")
        if isinstance(message, LLMServeError):
            raise message
        return message


def cost_of(reports: Sequence[Report]) -> GeneratorCost:
    busy = max(report.cpu / max(1e-9, report.seconds) for report in reports)
    late = percentile([lag for report in reports for lag in report.lags] or [0.0], 0.99)
    return GeneratorCost(len(reports), sum(report.cpu for report in reports), busy, late)


def main(descriptor: int) -> None:
    pipe = Connection(descriptor)
    # If the parent process is gone, there is nothing to report to.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            asyncio.run(_Worker(pipe.recv(), pipe).run())
        except LLMServeError as error:
            pipe.send(error)


class _Worker:
    """Runs a share in a process: warm-up, wait for the start, the load, the report."""

    def __init__(self, share: LoadShare, pipe: Connection) -> None:
        self._share = share
        self._pipe = pipe
        self._report = Report()
        self._start = 0.0
        self._unreachable_since: float | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        share = self._share
        kind = TritonSender if share.api == "triton" else OpenAISender
        async with kind(share.api, share.url, share.model, share.load) as sender:
            await self._warm_up(sender)
            self._pipe.send("ready")
            self._start = await asyncio.to_thread(self._pipe.recv)
            # What exists now is kept: the garbage collector need not scan it again and again.
            gc.collect()
            gc.freeze()
            await asyncio.sleep(self._start - time.monotonic())
            await self._measure(sender)
        self._pipe.send(self._report)

    async def _warm_up(self, sender: Sender) -> None:
        requests = iter(self._share.warmup)
        failures: list[ClientError] = []

        async def send_some() -> None:
            for request in requests:
                try:
                    await sender.send(request, [])
                except ClientError as error:
                    failures.append(error)

        await asyncio.gather(*(send_some() for _ in range(self._share.load.concurrency or 1)))
        if failures and len(failures) == len(self._share.warmup):
            raise failures[0]

    async def _measure(self, sender: Sender) -> None:
        load, report, loop = self._share.load, self._report, asyncio.get_running_loop()
        before = time.process_time()
        self._sending = sending = asyncio.ensure_future(self._send_all(sender))
        ticker = asyncio.ensure_future(self._tick())
        # Any message from the parent process means stop, and so does a closed pipe.
        loop.add_reader(self._pipe.fileno(), sending.cancel)
        limit = load.duration + _DRAIN if load.duration and load.concurrency else None
        await asyncio.wait([sending], timeout=limit)
        report.cpu = time.process_time() - before
        report.seconds = time.monotonic() - self._start
        loop.remove_reader(self._pipe.fileno())
        for task in (ticker, sending):
            task.cancel()
        await asyncio.wait([ticker, sending])
        if self._error is not None:
            raise self._error

    async def _send_all(self, sender: Sender) -> None:
        level, requests = self._share.load.concurrency, self._requests()
        loops = (self._closed_loop(sender, requests) for _ in range(level or 0))
        tasks = {asyncio.ensure_future(loop) for loop in loops}
        try:
            for request in () if level else self._share.requests:
                due = self._start + (request.due or 0.0)
                if (early := due - time.monotonic()) > 0:
                    await asyncio.sleep(early)
                task = asyncio.ensure_future(self._send(sender, request, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _closed_loop(self, sender: Sender, requests: Iterator[Request]) -> None:
        """Keep one request in flight until there are no more."""
        for request in requests:
            await self._send(sender, request, time.monotonic())
            if self._unreachable_since is not None:
                await asyncio.sleep(_RETRY)

    def _requests(self) -> Iterator[Request]:
        """Yield the requests; with a duration they repeat, each with a new index."""
        share, duration = self._share, self._share.load.duration
        for turn in count() if duration else range(1):
            for request in share.requests:
                if duration and time.monotonic() >= self._start + duration:
                    return
                yield replace(request, index=request.index + turn * share.total)

    async def _send(self, sender: Sender, request: Request, due: float) -> None:
        sent = time.monotonic()
        if not self._share.load.concurrency:
            self._report.lags.append(sent - due)
        parts: Parts = []
        failure: ClientError | None = None
        try:
            await sender.send(request, parts)
        except ClientError as error:
            failure = error
        except Exception as error:
            # Not the server's failure: this would fail every time.
            self._error = self._error or error
            self._sending.cancel()
            return
        now = time.monotonic()
        self._watch_server(failure, now)
        done = parts[-1][0] if parts and failure is None else now
        self._report.records.append(self._record(request, (due, sent, done), parts, failure))

    def _record(
        self, request: Request, times: Sequence[float], parts: Parts, failure: ClientError | None
    ) -> Record:
        answers = [answer for _, answer in parts]
        tokens = tokens_of([a.output_tokens for a in answers], cumulative=self._share.cumulative)
        moments = (*times, *(at for at, _ in parts))
        due, sent, done, *pieces = (round(moment - self._start, 6) for moment in moments)
        inputs = (answer.input_tokens for answer in answers if answer.input_tokens is not None)
        return Record(
            request.index, due, sent, done,
            pieces=tuple(pieces),
            tokens=tokens or (),
            input_tokens=next(inputs, None),
            output_tokens=None if tokens is None else sum(tokens),
            finish_reason=next((a.finish_reason for a in answers if a.finish_reason), None),
            error=kind_of(failure) if failure else None,
            message=str(failure) if failure else None,
            texts=len(request.texts),
            adapter=str(request.options.get(ADAPTER.name, "")),
            image=request.image,
        )  # fmt: skip

    def _watch_server(self, failure: ClientError | None, now: float) -> None:
        """Record since when the server is unreachable, and end the load if that lasts."""
        if not isinstance(failure, UnreachableError):
            self._unreachable_since = None
        elif self._unreachable_since is None:
            self._unreachable_since = now
        elif now - self._unreachable_since > self._share.give_up and self._report.given_up is None:
            self._report.given_up = str(failure)
            self._sending.cancel()

    async def _tick(self) -> None:
        """Report progress, and record how far this process is behind schedule."""
        due = self._start
        while True:
            due = max(due + _TICK, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._report.lags.append(time.monotonic() - due)
            self._pipe.send(len(self._report.records))


def tokens_of(counts: Sequence[int | None], *, cumulative: bool) -> tuple[int, ...] | None:
    """Return how many tokens each piece contained; None if the model does not count.

    Our models count the whole answer so far, others each piece separately. If only the last piece
    has a count, as with OpenAI's usage, the first piece counts as one token.

    >>> tokens_of([1, 4, 8], cumulative=True), tokens_of([None, None, 8], cumulative=False)
    ((1, 3, 4), (1, 0, 7))
    """
    reported = [count for count in counts if count is not None]
    if not reported:
        return None
    if len(reported) < len(counts):
        last = counts[-1]
        if last is None or len(reported) > 1:
            return None
        return (1, *[0] * (len(counts) - 2), last - 1)
    if cumulative:
        return tuple(b - a for a, b in zip([0, *reported], reported, strict=False))
    return tuple(reported)


def kind_of(error: ClientError) -> str:
    words = re.findall("[A-Z][a-z]+", type(error).__name__)
    return " ".join(word.lower() for word in words if word not in ("Request", "Error"))
