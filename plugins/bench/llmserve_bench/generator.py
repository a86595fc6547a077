"""The load generator: processes that do nothing but send requests and note the times.

Progress, statistics and everything else stay in the process that started them, so that they do not
disturb the clock. Requests go through llmserve's asyncio client, as a user's would; a result says
how much of a core that took, and ``--processes`` spreads it.
"""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from llmserve.client import AsyncClient, Completion, Piece, connect_async
from llmserve.errors import ClientError, LLMServeError, UnreachableError
from llmserve_bench.figures import percentile
from llmserve_bench.results import GeneratorCost, Load, Record
from llmserve_bench.schedule import Request

OnProgress = Callable[[int, float], None]
"""Called with how many requests are done and how many seconds have passed."""
_HEAD_START = 0.1
"""Seconds from the order to start until the start, so that every process has read it."""
_TICK = 0.2
"""Seconds between two reports of progress."""
_GIVE_UP = 10.0
"""Seconds without any server after which a run ends; a restart may take some."""
_PAUSE = 0.1
"""Seconds before a place of a closed loop tries again where there is no server."""
_DRAIN = 60.0
"""Seconds to wait, after a duration, for what is still under way."""
_STOPPING = 15.0


@dataclass(frozen=True)
class Job:
    """One process's share of a load; ``total`` is how many requests all shares have together."""

    url: str
    model: str
    made_by_llmserve: bool
    load: Load
    warmup: Sequence[Request]
    requests: Sequence[Request]
    total: int
    give_up: float = _GIVE_UP

    def split(self, processes: int) -> list[Job]:
        """Deal it out, so that all shares together do what one process would."""
        level = self.load.concurrency
        processes = min(processes, level or processes, len(self.requests))
        return [
            replace(
                self,
                load=replace(self.load, concurrency=level and len(range(at, level, processes))),
                warmup=self.warmup[at::processes],
                requests=self.requests[at::processes],
            )
            for at in range(processes)
        ]


@dataclass
class Report:
    """What a process noted. ``texts`` are those of answers whose tokens the model did not count.

    ``cut`` says when the requests were sent that were under way when the load ended, ``gone``
    since when there was no server, where that ended it, and ``lags`` how late things were done.
    """

    records: list[Record] = field(default_factory=list)
    texts: dict[int, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    cut: list[float] = field(default_factory=list)
    gone: float | None = None
    given_up: str | None = None
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)
    interrupted: bool = False


class LoadGenerator:
    """Processes that are ready to send a load; to be used in a ``with`` block."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}
        for job in jobs:
            line, far_end = Pipe()
            self._workers[line] = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as g; g.main({far_end.fileno()})"],
                pass_fds=[far_end.fileno()],
                # Ctrl-C is for us to pass on: the workers still have to report.
                start_new_session=True,
            )
            far_end.close()
            line.send(job)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        for line, worker in self._workers.items():
            line.close()
            try:
                worker.wait(2.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def warm_up(self) -> None:
        """Wait until all are warm; raise why, where not one request of a warm-up succeeded."""
        for line in self._workers:
            self._receive(line)

    def run(self, on_progress: OnProgress) -> tuple[float, list[Report]]:
        """Start all at the same moment and gather their reports; Ctrl-C ends them early."""
        start = time.monotonic() + _HEAD_START
        for line in self._workers:
            with suppress(OSError):  # A worker that is gone is told of when it is heard.
                line.send(start)
        reports: dict[Connection, Report] = {}
        done = dict.fromkeys(self._workers, 0)
        deadline: float | None = None
        while waiting := [line for line in self._workers if line not in reports]:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = wait(waiting, left)
                if not ready:
                    raise LLMServeError("the load generator does not end", mend="try again")
                for line in (line for line in waiting if line in ready):
                    message = self._receive(line)
                    if isinstance(message, Report):
                        reports[line] = message
                    else:
                        done[line] = message
                        on_progress(sum(done.values()), time.monotonic() - start)
            except KeyboardInterrupt:
                if deadline is not None:
                    raise
                deadline = time.monotonic() + _STOPPING
                for line in waiting:
                    with suppress(OSError):
                        line.send("stop")
        for report in reports.values():
            report.interrupted = deadline is not None
        return start, list(reports.values())

    def _receive(self, line: Connection) -> Any:
        try:
            message = line.recv()
        except (EOFError, OSError):
            code = self._workers[line].wait()
            message = LLMServeError(f"a load generator ended by itself (exit code {code})")
        if isinstance(message, LLMServeError):
            raise message
        return message


def cost_of(reports: Sequence[Report]) -> GeneratorCost:
    busy = max(report.cpu / max(1e-9, report.seconds) for report in reports)
    late = percentile([lag for report in reports for lag in report.lags] or [0.0], 0.99)
    return GeneratorCost(len(reports), sum(report.cpu for report in reports), busy, late)


def main(descriptor: int) -> None:
    """Run one job: the whole of a worker's process."""
    line = Connection(descriptor)
    # Whoever started us may be gone, and then there is nobody to tell.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            asyncio.run(_Worker(line.recv(), line).run())
        except LLMServeError as error:
            line.send(error)


class _Worker:
    """Sends the requests of a job: warm-up, the order to start, the load, the report."""

    def __init__(self, job: Job, line: Connection) -> None:
        self._job = job
        self._line = line
        self._report = Report()
        self._start = 0.0
        self._next = 0
        self._under_way: dict[int, float] = {}
        self._gone: float | None = None
        self._error: Exception | None = None
        self._sending: asyncio.Future[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with connect_async(self._job.url, timeout=self._job.load.timeout) as client:
            await client.model(self._job.model)
            await self._warm_up(client)
            self._line.send("ready")
            self._start = await loop.run_in_executor(None, self._line.recv)
            # What exists by now stays: the collector need not look through it again and again.
            gc.collect()
            gc.freeze()
            await asyncio.sleep(self._start - time.monotonic())
            await self._measure(client)
        self._line.send(self._report)

    async def _warm_up(self, client: AsyncClient) -> None:
        waiting = list(self._job.warmup)
        failures: list[ClientError] = []

        async def place() -> None:
            while waiting:
                try:
                    await self._answer(client, waiting.pop(), [])
                except ClientError as error:
                    failures.append(error)

        width = min(self._job.load.concurrency or 1, len(waiting))
        await asyncio.gather(*(place() for _ in range(width)))
        if failures and len(failures) == len(self._job.warmup):
            raise failures[0]

    async def _measure(self, client: AsyncClient) -> None:
        load, report, loop = self._job.load, self._report, asyncio.get_running_loop()
        before = time.process_time()
        sending = self._sending = asyncio.ensure_future(self._send_all(client))
        ticking = asyncio.ensure_future(self._tick())
        # Any word from whoever started us means to stop, and so does the end of the line.
        loop.add_reader(self._line.fileno(), sending.cancel)
        patience = load.duration + _DRAIN if load.duration and load.concurrency else None
        await asyncio.wait([sending], timeout=patience)
        report.cpu = time.process_time() - before
        report.seconds = time.monotonic() - self._start
        report.cut = [sent - self._start for sent in self._under_way.values()]
        loop.remove_reader(self._line.fileno())
        for task in (ticking, sending):
            task.cancel()
        await asyncio.wait([ticking, sending])
        if self._error is not None:
            raise self._error
        if report.given_up is not None and self._gone is not None:
            report.gone = self._gone - self._start

    async def _send_all(self, client: AsyncClient) -> None:
        level = self._job.load.concurrency
        tasks = {asyncio.ensure_future(self._place(client)) for _ in range(level or 0)}
        try:
            for request in () if level else self._job.requests:
                due = self._start + (request.due or 0.0)
                if (early := due - time.monotonic()) > 0:
                    await asyncio.sleep(early)
                task = asyncio.ensure_future(self._send(client, request, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _place(self, client: AsyncClient) -> None:
        """Keep one request under way until there are no more or the time is over."""
        while (request := self._take()) is not None:
            await self._send(client, request, time.monotonic())
            if self._gone is not None:
                await asyncio.sleep(_PAUSE)

    def _take(self) -> Request | None:
        """Give the next request; under a duration they repeat, with numbers of their own."""
        duration = self._job.load.duration
        turn, at = divmod(self._next, len(self._job.requests))
        over = turn > 0 if duration is None else time.monotonic() >= self._start + duration
        if over:
            return None
        self._next += 1
        request = self._job.requests[at]
        return replace(request, index=request.index + turn * self._job.total)

    async def _send(self, client: AsyncClient, request: Request, due: float) -> None:
        sent = self._under_way[request.index] = time.monotonic()
        if not self._job.load.concurrency:
            self._report.lags.append(sent - due)
        pieces: list[tuple[float, Piece | Completion]] = []
        failure: ClientError | None = None
        try:
            await self._answer(client, request, pieces)
        except ClientError as error:
            failure = error
        except Exception as error:
            # Not the request's fault: it would go wrong every time.
            self._error = self._error or error
            self._stop()
            return
        now = time.monotonic()
        del self._under_way[request.index]
        self._look_for_server(failure, now)
        parts, times = [part for _, part in pieces], [at for at, _ in pieces]
        tokens = tokens_of([p.output_tokens for p in parts], sums=self._job.made_by_llmserve)
        if tokens is None and failure is None:
            self._report.texts[request.index] = [part.text for part in parts]
        moments = [due, sent, times[-1] if times and failure is None else now, *times]
        due, sent, done, *times = (round(moment - self._start, 6) for moment in moments)
        read = next((p.input_tokens for p in parts if p.input_tokens is not None), None)
        written = None if tokens is None else sum(tokens)
        reason = next((part.finish_reason for part in parts if part.finish_reason), None)
        end = (kind_of(failure), str(failure)) if failure else (None, None)
        counts = tuple(times), tokens or (), read, written, reason
        self._report.records.append(Record(request.index, due, sent, done, *counts, *end))

    async def _answer(
        self, client: AsyncClient, request: Request, pieces: list[tuple[float, Any]]
    ) -> None:
        model, prompt, options = self._job.model, request.prompt, request.options
        if not self._job.load.stream:
            answer = await client.generate(model, prompt, **options)
            pieces.append((time.monotonic(), answer))
            return
        async with aclosing(client.stream(model, prompt, **options)) as stream:
            async for piece in stream:
                pieces.append((time.monotonic(), piece))

    def _look_for_server(self, failure: ClientError | None, now: float) -> None:
        """Note since when there is no server, and end the load when that lasts."""
        if not isinstance(failure, UnreachableError):
            self._gone = None
        elif self._gone is None:
            self._gone = now
        elif now - self._gone > self._job.give_up and self._report.given_up is None:
            self._report.given_up = str(failure)
            self._stop()

    def _stop(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    async def _tick(self) -> None:
        """Tell how far it is, and notice how late this process comes to what is due."""
        due = self._start
        while True:
            due = max(due + _TICK, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._report.lags.append(time.monotonic() - due)
            self._line.send(len(self._report.records))


def tokens_of(counts: Sequence[int | None], *, sums: bool) -> tuple[int, ...] | None:
    """Say how many tokens each piece brought; None where the model does not count.

    Our models count the whole answer so far. Others may count each piece by itself, which shows
    where a count does not grow before the last piece.

    >>> tokens_of([1, 4, 8], sums=True), tokens_of([4, 4, 2], sums=False)
    ((1, 3, 4), (4, 4, 2))
    """
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    if sums or (all(b > a for a, b in pairwise(known[:-1])) and known[-1] >= max(known)):
        return tuple(b - a for a, b in zip([0, *known], known, strict=False))
    return tuple(known)


def kind_of(error: ClientError) -> str:
    """Name a failure after its class.

    >>> kind_of(UnreachableError("no server"))
    'unreachable'
    """
    words = re.findall("[A-Z][a-z]+", type(error).__name__)
    return " ".join(word.lower() for word in words if word not in ("Request", "Error"))
