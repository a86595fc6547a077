"""The lines of all batches that are open: which is asked next, and when there is room for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llmserve.client import answer_line
from llmserve.contract.failures import DEATHS_OF_ONE, FAILURES, MAY_SUCCEED_LATER
from llmserve.errors import LLMServeError
from llmserve_gateway.batches.calls import Answer, Call
from llmserve_gateway.batches.folder import EVERYONE
from llmserve_gateway.batches.jobs import Job, Line
from llmserve_gateway.batches.threads import in_thread
from llmserve_gateway.keys import BatchKey

if TYPE_CHECKING:
    from llmserve_gateway.gateway import Gateway
    from llmserve_gateway.headers import AsgiApp

log = logging.getLogger("llmserve.gateway")

QUIET = 1.0
"""Seconds without other requests after which batches are alone; conversations have pauses."""
LOAD_QUIET = 30.0
"""Seconds after which a model is loaded for a batch, and another may have to make place for it:
conversations come back to theirs."""
ADVANCE = 10.0
"""After so many seconds without an answer, a batch has one request beside any others."""
_DELAYS, _FAULTS = 2, 3
"""After so many a line is an error."""
_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
_DIED = FAILURES["model_died"]


class Lines:
    """Asks the application for the lines of jobs, beside all other requests."""

    def __init__(
        self, gateway: Gateway, app: AsgiApp, is_full: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.changed = asyncio.Event()
        """Set when there may be more to do."""
        self._gateway = gateway
        self._app = app
        self._is_full = is_full
        """Whether a key may have no more answers."""
        self._jobs: list[Job] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[Call, Job] = {}
        """Those in flight, in the order in which they began."""
        self._is_alone = False
        """Whether the line in flight may end its model: no other runs beside it."""
        self._looking: asyncio.Task[None] | None = None
        """What sees whether models that have died are back."""
        limits = gateway.settings.limits
        self._most = max(1, min(limits.batch_requests, limits.max_requests // 2))
        self._beside = min(limits.batch_beside, self._most)
        self._width = self._most
        """How many run while batches are alone: fewer after they had to make room."""
        self._answered = 0.0
        """When the last line had its answer."""
        gateway.admission.on_arrival = self._make_room

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self.changed.set()

    async def remove(self, job: Job) -> None:
        """Ask no more for a job, and wait until nothing of it is in flight."""
        job.is_stopped = True
        for call, owner in self._calls.items():
            if owner is job:
                call.leave()
        while job.in_flight:
            await asyncio.wait(job.in_flight)
        if job in self._jobs:
            self._jobs.remove(job)
        self.changed.set()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for job in [*self._jobs]:
            await self.remove(job)

    def start(self) -> None:
        """Start as many lines as there is room for."""
        self._look_for_models()
        most = self._room()
        while len(self._tasks) < most and not self._is_alone:
            if (line := self._next()) is None:
                return
            task = asyncio.ensure_future(self._answer(line))
            for tasks in (self._tasks, line.job.in_flight):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    def _look_for_models(self) -> None:
        """See whether models that have died are back, while lines of others are asked."""
        now = asyncio.get_running_loop().time()
        away = [(job, model) for job in self._jobs for model in job.away(now)]
        if away and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look_for(away))

    async def _look_for(self, away: Sequence[tuple[Job, str]]) -> None:
        ready: set[str] = set()
        try:
            for model in {model for _, model in away}:
                if await self._is_ready(model) and await self._needs_no_place(model):
                    ready.add(model)
        except Exception:
            log.exception("it is not known which models are ready")
        for job, model in away:
            if model in ready:
                job.has_returned(model)
            else:
                now = asyncio.get_running_loop().time()
                job.is_still_away(model, now, (_PAUSE, _LONGEST_PAUSE))
        self.changed.set()

    def _room(self) -> int:
        """Return how many requests of batches may run now."""
        admission = self._gateway.admission
        if admission.draining or self._is_alone:
            return 0
        return self._width if self._is_quiet(QUIET) else self._kept()

    def _is_quiet(self, seconds: float) -> bool:
        """Return whether there were no other requests for so long."""
        now, since = asyncio.get_running_loop().time(), self._gateway.admission.idle_since
        # Before the first request, it is 0.
        return since == 0.0 or (since is not None and now - since >= seconds)

    def _kept(self) -> int:
        """Return how many requests of batches run beside others."""
        loads, admission = self._gateway.loads, self._gateway.admission
        if loads is not None and loads.first:
            # Each would keep a model loaded, which may have to make place.
            return 0
        is_late = asyncio.get_running_loop().time() - self._answered > ADVANCE
        # Who waits for slots gets theirs.
        beside = 0 if admission.waiting else self._beside
        return max(beside, 1) if is_late else beside

    def _make_room(self) -> None:
        """Leave all requests but those that may run beside others: the oldest get to their end."""
        kept = [call for call in self._calls if not call.key.waits_for_model][: self._kept()]
        left = [call for call in self._calls if call not in kept]
        for call in kept:
            # It may be just about to ask for its model.
            call.key.may_load = False
        if left:
            self._width = max(1, self._beside, len(self._calls) // 2)
        for call in left:
            call.leave()

    def _next(self) -> Line | None:
        """Return the next line; each job has its turn."""
        now = asyncio.get_running_loop().time()
        jobs = [job for job in self._jobs if not (job.is_stopped or job.lacks_key)]
        if suspects := [job for job in jobs if job.has_suspect(now)]:
            # It waits until the others have their answers, and no other begins.
            self._is_alone = not self._tasks
            return None if self._tasks else suspects[0].next_suspect(now)
        for job in jobs:
            if (line := job.next(now)) is not None:
                self._jobs.remove(job)
                self._jobs.append(job)
                return line
        return None

    async def _answer(self, line: Line) -> None:
        """Ask for one line; it is put back if that is to be done again."""
        is_alone, model = self._is_alone, line.request.model
        try:
            key = self.key_of(line.job.batch.owner)
            if key is None:
                line.job.lacks_key = True
                line.job.put_back(line)
            elif line.faults >= _FAULTS:
                await self._refuse(line, "server_error", "the gateway failed: see its log")
            elif self._is_full(line.job.batch.owner):
                await self._refuse(line, "storage_full", "the key has too many files: delete some")
            elif not await self._needs_no_place(model):
                self._again(line, _PAUSE)
            else:
                await self._ask(line, key)
        except LLMServeError as error:
            # The disk is full, or the input has changed.
            log.error("batch %s: %s", line.job.batch.id, error)
            self._again(line, _LONGEST_PAUSE)
        except Exception:
            log.exception("batch %s, line %s", line.job.batch.id, line.request.number)
            line.faults += 1
            self._again(line, _PAUSE)
        finally:
            self._is_alone = self._is_alone and not is_alone
            line.job.changed.set()
            self.changed.set()

    async def _ask(self, line: Line, key: BatchKey) -> None:
        job, request = line.job, line.request
        body = await in_thread(_body, line)
        if job.is_stopped or not (self._is_alone or len(self._calls) < self._room()):
            # Others have come, or it was told to stop, while the body was read.
            job.put_back(line)
            return
        key.is_charged, key.answer_tokens = line.is_charged, line.answer_tokens
        key.may_load = self._is_quiet(LOAD_QUIET)
        call = Call(self._app, request.endpoint, body, key)
        self._calls[call] = job
        try:
            answer = await call.answer()
        finally:
            del self._calls[call]
            line.is_charged, line.answer_tokens = key.is_charged, key.answer_tokens
        if answer is None:
            job.put_back(line)
        elif await self._may_be_answered_later(line, answer):
            pause = _PAUSE if answer.pause is None else answer.pause
            self._again(line, min(pause, _LONGEST_PAUSE))
        else:
            self._width = min(self._most, self._width + 1)
            self._answered = asyncio.get_running_loop().time()
            is_answered = answer.status == 200
            content = answer_line(
                request.custom_id,
                status=answer.status,
                request_id=answer.headers.get("x-request-id", ""),
                body=None if is_answered else answer.body,
                error=None if is_answered else answer.error,
            )
            await self._write(line, content, answer.content if is_answered else None)

    async def _refuse(self, line: Line, code: str, why: str) -> None:
        await self._write(line, answer_line(line.request.custom_id, error=(code, why)))

    async def _write(self, line: Line, content: dict[str, Any], body: bytes | None = None) -> None:
        async with line.job.writing:
            await in_thread(line.job.answers.append, content, body)

    async def _may_be_answered_later(self, line: Line, answer: Answer) -> bool:
        if answer.status == _DIED.status and answer.error[0] == _DIED.api_code:
            line.deaths += 1
            line.job.has_died(line.request.model)
            return line.deaths < DEATHS_OF_ONE
        if answer.status == 504:
            line.delays += 1
            return line.delays < _DELAYS
        if answer.status == 404:
            return await self._is_loading(line.request.model)
        return answer.status in MAY_SUCCEED_LATER

    def _again(self, line: Line, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        line.job.hold(line.request.model, now + seconds)
        line.job.put_back(line)

    def key_of(self, owner: str) -> BatchKey | None:
        """Return the key of a batch as it is now, None if it has been withdrawn."""
        keys = self._gateway.keys
        if keys is None:
            return BatchKey("", "") if owner == EVERYONE else None
        key = keys.of_hash(owner)
        return None if key is None else BatchKey(**vars(key))

    async def _is_ready(self, model: str) -> bool:
        state = await self._gateway.catalog.state()
        return bool(state["models"].get(model, {}).get("ready"))

    async def _needs_no_place(self, model: str) -> bool:
        """Return whether a model may be asked now, since it has not to be loaded or may be."""
        if self._gateway.loads is None or self._is_quiet(LOAD_QUIET):
            return True
        reports = await self._gateway.catalog.supervised()
        return all(
            report.name != model or report.demand is None or report.demand.loaded
            for report in reports
        )

    async def _is_loading(self, model: str) -> bool:
        """Return whether a model that is not there may come: nothing is there, or it is known."""
        catalog, named = self._gateway.catalog, self._gateway.settings.models
        if named and model not in named:
            return False  # `serve` has it, and this gateway will never offer it.
        if any(report.name == model for report in await catalog.supervised()):
            return True
        return not (await catalog.state())["models"]


def _body(line: Line) -> bytes:
    """Return what to send; it is not larger than what was uploaded, which has a limit."""
    body = line.job.requests.body(line.request)
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    # As in a request of a client, it may have half of a pair.
    return text.encode(errors="surrogatepass")
