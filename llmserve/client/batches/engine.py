"""Answers files of requests: which line is asked next, and again, and which is given up.

One engine for the command line, which asks a server over HTTP, and for the gateway, which asks
itself. What differs is a :class:`BatchServer`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.client.batches import jobs
from llmserve.client.batches.answers import answer_line
from llmserve.client.batches.jobs import SERVER, BatchJob, BatchLine
from llmserve.client.openai import OpenAIApi
from llmserve.client.threads import in_thread
from llmserve.contract.failures import DEATHS_OF_ONE, FAILURES, MAY_SUCCEED_LATER, back_off
from llmserve.errors import ClientError, LLMServeError, RequestRejectedError, UnreachableError

log = logging.getLogger("llmserve.batches")

_SHORTEST_PAUSE = 0.05
_PERIOD = 0.25
"""Seconds after which it is seen whether there is more room."""
_DELAYS, _FAULTS = 2, 3
"""After so many a line is an error."""
_DIED, _LATE, _MISSING = (FAILURES[code] for code in ("model_died", "timeout", "not_ready"))


class ConnectionBrokenError(UnreachableError):
    """The connection was made, and ended before there was an answer."""


@dataclass(frozen=True)
class BatchReply:
    """What a server has answered to a line."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    """Of 30 MB if it is one of embeddings: parsing that would hold up all other requests."""

    @property
    def body(self) -> Any:
        """What the answer says in JSON."""
        with suppress(ValueError, RecursionError):
            return json.loads(self.content)
        return None

    @property
    def code(self) -> str:
        """The code of a refusal; servers use a number, a name or nothing."""
        body = self.body
        error = body.get("error") if isinstance(body, dict) else None
        code = error.get("code") or error.get("type") if isinstance(error, dict) else None
        return str(code) if code else RequestRejectedError.code

    @property
    def pause(self) -> float | None:
        """The seconds after which it asks to be asked again, within reason."""
        try:
            seconds = float(self.headers["retry-after"])
        except (LookupError, ValueError):
            return None
        # A date, or not a number, is not what a server with this API sends.
        return (
            min(max(seconds, _SHORTEST_PAUSE), jobs.LONGEST_PAUSE) if seconds == seconds else None
        )


class BatchServer(Protocol):
    """Where lines are asked, and what is known of the models there."""

    def room(self) -> int:
        """Return how many lines may be in flight now."""
        ...

    async def ask(self, line: BatchLine) -> BatchReply | None:
        """Return the answer to a line; None if it was left, or there is no room for it now.

        A :class:`ClientError` is the end of the line, but an :class:`UnreachableError`, which says
        that there is no server, or one that has ended meanwhile.
        """
        ...

    async def is_ready(self, model: str) -> bool:
        """Return whether a model that has died may be asked again."""
        ...

    async def may_come(self, model: str) -> bool:
        """Return whether a model that the server does not have is one that it still loads."""
        ...

    async def has_come(self, model: str) -> bool:
        """Return whether the server says that it has a model which it had not."""
        ...

    async def is_there(self) -> bool:
        """Return whether the server answers others, though it has not answered a line."""
        ...

    def note_answer(self) -> None:
        """Note that a line has its end."""
        ...

    def leave(self, job: BatchJob) -> None:
        """Leave what is in flight of a job."""
        ...


class BatchEngine:
    """Asks a server for the lines of jobs, of each in turn.

    With ``patience``, that many seconds without an answer are the end: of a line, if it is its
    model that refuses, and of its job, if it is the server. So is what makes a job impossible.
    Without, all is tried again until who has begun a job removes it.
    """

    def __init__(self, server: BatchServer, *, patience: float | None = None) -> None:
        self._server = server
        self._patience = patience
        self._changed = asyncio.Event()
        """Set when there may be more to do."""
        self._jobs: list[BatchJob] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_alone = False
        """Whether the line in flight may end its model: no other runs beside it."""
        self._looking: asyncio.Task[None] | None = None
        """What sees whether models that have died are back."""

    async def run(self) -> None:
        """Answer all jobs until this is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                self._start()
                # Lines wait for moments too: for room, or until a model is asked again.
                timer = loop.call_later(_PERIOD, self._changed.set) if self._jobs else None
                await self._changed.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            if self._looking is not None:
                self._looking.cancel()
            for job in [*self._jobs]:
                await self.remove(job)

    async def answer(self, job: BatchJob) -> None:
        """Answer one job, and raise what makes that impossible."""
        running = asyncio.ensure_future(self.run())
        self.add(job)
        try:
            while not (job.is_done or job.failure):
                job.changed.clear()
                await job.changed.wait()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if job.failure:
            raise job.failure

    def add(self, job: BatchJob) -> None:
        self._jobs.append(job)
        self._changed.set()

    async def remove(self, job: BatchJob) -> None:
        """Ask no more for a job, and wait until nothing of it is in flight."""
        job.is_stopped = True
        self._server.leave(job)
        while job.in_flight:
            await asyncio.wait(job.in_flight)
        if job in self._jobs:
            self._jobs.remove(job)
        self._changed.set()

    def _start(self) -> None:
        """Start as many lines as there is room for."""
        self._look_for_models()
        room = self._server.room()
        while len(self._tasks) < room and not self._is_alone:
            if (line := self._next(room)) is None:
                return
            line.is_alone = self._is_alone
            line.job.running[line.request.model] += 1
            task = asyncio.ensure_future(self._answer(line))
            for tasks in (self._tasks, line.job.in_flight):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            # Its place is free by then.
            task.add_done_callback(lambda _: self._changed.set())

    def _next(self, room: int) -> BatchLine | None:
        """Return the next line; each job has its turn."""
        now = asyncio.get_running_loop().time()
        open_jobs = [job for job in self._jobs if not (job.is_stopped or job.is_held)]
        if suspects := [job for job in open_jobs if job.has_suspect(now)]:
            # It waits until the others have their answers, and no other begins.
            self._is_alone = not self._tasks
            return None if self._tasks else suspects[0].next_suspect(now)
        for job in open_jobs:
            if (line := job.next(now, room)) is not None:
                self._jobs.remove(job)
                self._jobs.append(job)
                return line
        return None

    def _look_for_models(self) -> None:
        """See whether models that have died are back, while lines of others are asked."""
        now = asyncio.get_running_loop().time()
        away = [(job, model) for job in self._jobs for model in job.away(now)]
        if away and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look_for(away))

    async def _look_for(self, away: Sequence[tuple[BatchJob, str]]) -> None:
        ready: set[str] = set()
        try:
            for model in {model for _, model in away}:
                if await self._server.is_ready(model):
                    ready.add(model)
        except Exception:
            log.exception("it is not known which models are ready")
        for job, model in away:
            now = asyncio.get_running_loop().time()
            if model in ready or job.gives_up(model, now, self._patience, now):
                job.has_returned(model)
            else:
                self._wake_at(job.is_still_away(model, now))
        self._changed.set()

    async def _answer(self, line: BatchLine) -> None:
        """Ask for one line; it is put back if that is to be done again."""
        job = line.job
        try:
            if line.faults >= _FAULTS:
                await self._end(line, error=("server_error", "who asks has failed: see its log"))
            else:
                await self._ask(line)
        except LLMServeError as error:
            # The disk is full, or the input has changed.
            self._note_failure(line, error, jobs.LONGEST_PAUSE)
        except Exception as error:
            line.faults += 1
            self._note_failure(line, error, jobs.FIRST_PAUSE)
        finally:
            job.running[line.request.model] -= 1
            self._is_alone = self._is_alone and not line.is_alone
            job.changed.set()

    def _note_failure(self, line: BatchLine, error: Exception, pause: float) -> None:
        job, is_known = line.job, isinstance(error, LLMServeError)
        if self._patience is not None:
            job.fail(error)
        else:
            log.error(
                "batch %s, line %s: %s", job.name, line.request.number, error, exc_info=not is_known
            )
        self._again(line, pause, line.request.model)

    async def _ask(self, line: BatchLine) -> None:
        try:
            reply = await self._server.ask(line)
        except UnreachableError as error:
            await self._after_break(line, error)
        except ClientError as error:
            await self._end(line, error=(error.code, error.problem))
        else:
            if reply is None:
                line.job.put_back(line)
            else:
                await self._take(line, reply)

    async def _take(self, line: BatchLine, reply: BatchReply) -> None:
        job, request = line.job, line.request
        job.has_answered(SERVER)
        if reply.status == 401:
            # It would be that of all other lines too.
            raise OpenAIApi.refusal(reply.status, reply.content)
        pause = reply.pause or self._pause(line)
        may_be_answered_later = await self._may_be_answered_later(line, reply)
        if not may_be_answered_later:
            job.has_answered(request.model)
        elif not self._gives_up(line, request.model, pause):
            line.tries += 1
            # Others that are in flight have their places; one that is away has none.
            is_full = reply.status == FAILURES["queue_full"].status
            self._again(line, pause, None if is_full else request.model)
            return
        self._server.note_answer()
        content, is_answered = reply.content, reply.status == 200
        job.is_proven = job.is_proven or is_answered
        error = None
        if not is_answered:
            error = (reply.code, OpenAIApi.refusal(reply.status, content).problem)
        await self._end(
            line,
            content if is_answered else None,
            status=reply.status,
            request_id=reply.headers.get("x-request-id", ""),
            body=None if is_answered else reply.body,
            error=error,
        )

    async def _may_be_answered_later(self, line: BatchLine, reply: BatchReply) -> bool:
        if reply.status == _DIED.status and reply.code == _DIED.api_code:
            line.deaths += 1
            line.job.has_died(line.request.model)
            return line.deaths < DEATHS_OF_ONE
        if reply.status == _LATE.status and reply.code == _LATE.api_code:
            # A server that says nothing of the kind is a proxy, whose server may start again.
            line.delays += 1
            return line.delays < _DELAYS
        if reply.status == _MISSING.status:
            return await self._may_come(line)
        return reply.status in MAY_SUCCEED_LATER

    async def _may_come(self, line: BatchLine) -> bool:
        """Return whether the model that a line has missed may come, or has come since."""
        if await self._server.may_come(line.request.model):
            return True
        # Once: others of its name are there, and not what the line asks for.
        is_first, line.has_missed = not line.has_missed, True
        return is_first and await self._server.has_come(line.request.model)

    async def _after_break(self, line: BatchLine, error: UnreachableError) -> None:
        job = line.job
        if isinstance(error, ConnectionBrokenError) and job.is_proven:
            line.deaths += 1
            job.has_died(line.request.model)
            if line.deaths == DEATHS_OF_ONE:
                problem = f"the connection broke {DEATHS_OF_ONE} times: {error.words}"
                await self._end(line, error=("connection_broken", problem))
                return
        pause, held = self._pause(line), SERVER
        if job.is_proven and await self._server.is_there():
            job.has_answered(SERVER)
            held = line.request.model
        elif self._gives_up(line, SERVER, pause):
            job.fail(error)
        line.tries += 1
        self._again(line, pause, held)

    async def _end(self, line: BatchLine, raw: bytes | None = None, **content: Any) -> None:
        """Write the line of the output."""
        written = answer_line(line.request.custom_id, **content)
        async with line.job.writing:
            await in_thread(line.job.answers.append, written, raw)
        line.job.on_line(written)

    def _pause(self, line: BatchLine) -> float:
        return back_off(line.tries, jobs.FIRST_PAUSE, jobs.LONGEST_PAUSE)

    def _gives_up(self, line: BatchLine, name: str, pause: float) -> bool:
        now = asyncio.get_running_loop().time()
        return line.job.gives_up(name, now + pause, self._patience, now)

    def _again(self, line: BatchLine, seconds: float, held: str | None) -> None:
        """Ask a line again after a while, and before that nothing of what is ``held``."""
        at = asyncio.get_running_loop().time() + seconds
        if held is not None:
            line.job.hold(held, at)
        if held is None and not line.deaths:
            line.job.rest(line, at)
        else:
            line.job.put_back(line)
        self._wake_at(at)

    def _wake_at(self, moment: float) -> None:
        asyncio.get_running_loop().call_at(moment, self._changed.set)
