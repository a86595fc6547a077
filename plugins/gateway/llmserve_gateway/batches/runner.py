"""The life of batches: checked, answered, ended with their results, continued after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.client import (
    BatchEngine,
    BatchFileError,
    BatchJob,
    BatchRequests,
    answer_line,
    in_thread,
    open_answers,
)
from llmserve.errors import LLMServeError
from llmserve_gateway.batches import uploads
from llmserve_gateway.batches.asking import Asking
from llmserve_gateway.batches.checking import checked
from llmserve_gateway.batches.folder import Folder
from llmserve_gateway.batches.records import Batch, StoredFile
from llmserve_gateway.bodies import MAX_BYTES, MAX_IMAGE_BYTES
from llmserve_gateway.errors import ApiError

if TYPE_CHECKING:
    from llmserve_gateway.gateway import Gateway
    from llmserve_gateway.headers import AsgiApp

log = logging.getLogger("llmserve.gateway")

MAX_REQUESTS = 50_000
"""The requests of a batch."""
MAX_LINE = MAX_BYTES + MAX_IMAGE_BYTES
"""The bytes of a request; what its model takes of that is seen when it is asked."""
MAX_NAME = 512
"""The characters of a request's ``custom_id``, and of its model: these are in memory."""
_OPEN, _OPEN_OF_ONE = 8, 2
"""How many batches are in memory: of all keys together, and of one."""
_CHECKED = 2
"""How many files are checked at once."""
_KEPT = 1000
"""How many batches of one key are remembered that are over; their results are files."""
_PERIOD, _FILES_PERIOD = 0.25, 5.0
_PAUSE = 30.0
"""Until a batch is tried again whose files cannot be read or written."""
_GRACE = 86400.0
"""For so many seconds after its time it is tried again: it has answers that were paid for."""


class _InterruptedError(Exception):
    """An earlier gateway ended while it checked the file of a batch."""


class Runner:
    """The batches of one gateway, on its event loop."""

    def __init__(self, gateway: Gateway, folder: Folder, app: AsgiApp) -> None:
        self.folder = folder
        self._gateway = gateway
        self._app = app
        self._asking: Asking | None = None
        self._engine: BatchEngine | None = None
        self._jobs: dict[str, BatchJob] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._open: list[Batch] = []
        """Those that have a place in memory."""
        self._checking = asyncio.Semaphore(_CHECKED)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer all batches until this is cancelled."""
        self._asking = asking = Asking(self._gateway, self._app, self._is_full)
        self._engine = engine = BatchEngine(asking)
        for batch in sorted(self.folder.batches.all(), key=lambda batch: batch.created_at):
            if batch.is_unfinished:
                self.begin(batch)
        watching = asyncio.ensure_future(self._drop_expired_files())
        try:
            await engine.run()
        finally:
            watching.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, batch: Batch) -> None:
        """Begin a new batch; it counts, and needs its file, while it is being saved too."""
        self.folder.add(batch)
        try:
            await in_thread(self.folder.save, batch)
        except OSError:
            self.folder.forget(batch)
            raise
        self.begin(batch)
        batches = self.folder.batches.of(batch.owner)
        # One that still has its event is being saved.
        over = [b for b in batches if not b.is_unfinished and b.id not in self._stops]
        for old in sorted(over, key=lambda b: b.created_at)[:-_KEPT]:
            await self._drop(old)

    async def delete(self, record: StoredFile | Batch) -> None:
        self.folder.forget(record)
        await in_thread(self.folder.delete, record)

    def begin(self, batch: Batch) -> None:
        """Begin a batch, or continue one."""
        self._stops[batch.id] = asyncio.Event()
        if batch.status == "cancelling":
            self._stops[batch.id].set()
        task = asyncio.ensure_future(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._stops.pop(batch.id, None))

    async def cancel(self, batch: Batch) -> None:
        if batch.status in ("validating", "in_progress"):
            batch.become("cancelling", time.time())
            if (stop := self._stops.get(batch.id)) is not None:
                stop.set()
            await in_thread(self.folder.save, batch)

    def count(self, batch: Batch) -> None:
        """Bring the numbers of a batch up to date."""
        if (job := self._jobs.get(batch.id)) is not None:
            _count(batch, job)

    def is_read(self, file: StoredFile) -> bool:
        """Return whether a batch still reads a file."""
        batches = self.folder.batches.of(file.owner)
        return any(b.input_file_id == file.id and b.is_unfinished for b in batches)

    def _is_full(self, owner: str) -> bool:
        """Return whether the files of a key, with the answers that it has so far, are too many."""
        jobs = [job for job in self._jobs.values() if job.owner == owner]
        held = sum(job.answers.path.stat().st_size for job in jobs)
        return self.folder.used(owner) + held > uploads.MAX_STORED

    async def _run(self, batch: Batch) -> None:
        while batch.is_unfinished:
            await self._wait_for_place(batch)
            # Nothing is waited for between these two, or others would see the same place.
            self._open.append(batch)
            pause = 0.0
            try:
                await self._answer(batch)
            except BatchFileError as error:
                pause = _PAUSE
                await self._fail(batch, f"{error.what}: {error.hint}", line=error.line)
            except _InterruptedError:
                pause = _PAUSE
                what = "the gateway ended while it checked the file: create the batch again"
                await self._fail(batch, what, code="validation_interrupted")
            except Exception as error:
                is_known = isinstance(error, (LLMServeError, ApiError, OSError))
                log.error("batch %s: %s", batch.id, error, exc_info=not is_known)
                pause = _PAUSE
                if batch.is_unfinished and time.time() >= batch.expires_at + _GRACE:
                    await self._fail(batch, "the gateway cannot use its files: see its log")
            finally:
                self._open.remove(batch)
            if batch.is_unfinished:
                await asyncio.sleep(pause)

    async def _wait_for_place(self, batch: Batch) -> None:
        """Wait until there is room in memory."""
        stop = self._stops[batch.id]
        while not self._has_place(batch, is_over=stop.is_set() or time.time() >= batch.expires_at):
            # A batch that is to end looks again a while later: its event stays set.
            await (asyncio.sleep(_PERIOD) if stop.is_set() else any_of(stop, seconds=_PERIOD))

    def _has_place(self, batch: Batch, *, is_over: bool) -> bool:
        if is_over:
            # It needs its place for moments only: it waits for none that is being answered.
            return len(self._open) < 2 * _OPEN
        owners = [other.owner for other in self._open]
        is_free = len(owners) < _OPEN and owners.count(batch.owner) < _OPEN_OF_ONE
        # That of a key that was withdrawn would keep its place for nothing.
        return is_free and self._asking is not None and self._asking.key_of(batch.owner) is not None

    async def _answer(self, batch: Batch) -> None:
        assert self._engine is not None  # noqa: S101
        source = self.folder.data(self.folder.file(batch.owner, batch.input_file_id))
        limits: dict[str, Any] = {
            "endpoints": (batch.endpoint,),
            "many": MAX_REQUESTS,
            "longest": MAX_LINE,
            "longest_name": MAX_NAME,
        }
        with ExitStack() as stack:
            requests = await self._requests(batch, source, limits)
            stack.enter_context(closing(requests))
            opening = open_answers(self.folder.answers(batch), requests)
            answers = await in_thread(stack.enter_context, opening)
            job = BatchJob(requests, answers, name=batch.id, owner=batch.owner)
            self._jobs[batch.id] = job
            _count(batch, job)
            try:
                if batch.status == "validating":
                    await self._become(batch, "in_progress")
                self._engine.add(job)
                is_over = await self._wait_for(batch, job)
            finally:
                await self._engine.remove(job)
                del self._jobs[batch.id]
            if is_over:
                await self._finish(batch, job)

    async def _requests(
        self, batch: Batch, source: Path, limits: Mapping[str, Any]
    ) -> BatchRequests:
        """Check the file of a batch; one during whose check the gateway died is not checked again.

        What has been in progress has passed once.
        """
        if batch.is_being_checked:
            raise _InterruptedError
        async with self._checking:
            if "in_progress" in batch.moments:
                return await checked(source, limits)
            try:
                await self._mark(batch, is_being_checked=True)
                return await checked(source, limits)
            finally:
                await self._mark(batch, is_being_checked=False)

    async def _mark(self, batch: Batch, *, is_being_checked: bool) -> None:
        batch.is_being_checked = is_being_checked
        # A disk that is full is told of when something else is saved.
        with suppress(OSError):
            await in_thread(self.folder.save, batch)

    async def _wait_for(self, batch: Batch, job: BatchJob) -> bool:
        """Wait until a batch is done, is to be cancelled, or has no time left: not without key."""
        stop = self._stops[batch.id]
        while not (job.is_done or stop.is_set()):
            left = batch.expires_at - time.time()
            if left <= 0:
                break
            if job.is_held:
                # Its key has been withdrawn.
                return False
            job.changed.clear()
            await any_of(stop, job.changed, seconds=left)
        return True

    async def _finish(self, batch: Batch, job: BatchJob) -> None:
        """Write the results, which are the same if this is interrupted and done again."""
        if not job.is_done and batch.status != "cancelling":
            batch.has_expired = True
            await in_thread(self.folder.save, batch)
        final = "expired" if batch.has_expired else "completed"
        if batch.status == "cancelling":
            final = "cancelled"
        if not job.is_done:
            why = "was cancelled" if final == "cancelled" else "had no time left"
            error = (f"batch_{final}", f"the batch {why} before this request was answered")
            await in_thread(_append_all, job, error)
        elif batch.status == "in_progress":
            await self._become(batch, "finalizing")
        _count(batch, job)
        saved = await in_thread(self._save_results, batch, job)
        for file in saved:
            self.folder.add(file)
        batch.has_output, batch.has_errors = (
            any(file.id == name for file in saved) for name in batch.result_ids
        )
        await self._end(batch, final)

    def _save_results(self, batch: Batch, job: BatchJob) -> list[StoredFile]:
        """Return the files of the answers and of the errors, as far as there are any."""
        now = int(time.time())
        expiry = None if batch.keep_seconds is None else now + batch.keep_seconds
        saved = []
        for path, kind in zip(self.folder.results(batch), ("output", "error"), strict=True):
            if job.answers.save(path, failed=kind == "error"):
                name, size = f"{batch.id}_{kind}.jsonl", path.stat().st_size
                saved.append(
                    StoredFile(path.name, batch.owner, name, size, "batch_output", now, expiry)
                )
                self.folder.save(saved[-1])
        return saved

    async def _fail(
        self,
        batch: Batch,
        message: str,
        *,
        line: int | None = None,
        code: str = "invalid_request",
    ) -> None:
        batch.errors = [{"code": code, "line": line, "message": message, "param": None}]
        try:
            await self._end(batch, "failed")
        except OSError as error:
            log.error("batch %s: %s", batch.id, error)

    async def _end(self, batch: Batch, status: str) -> None:
        await self._become(batch, status)
        await in_thread(self.folder.answers(batch).unlink, missing_ok=True)

    async def _become(self, batch: Batch, status: str) -> None:
        before = batch.status, batch.moments
        batch.become(status, time.time())
        try:
            await in_thread(self.folder.save, batch)
        except OSError:
            # As it is on the disk, so that it is saved again later; or it was cancelled meanwhile.
            if batch.status == status:
                batch.status, batch.moments = before
            raise

    async def _drop_expired_files(self) -> None:
        while True:
            now = time.time()
            for file in self.folder.files.all():
                is_over = file.expires_at is not None and file.expires_at <= now
                if is_over and not self.is_read(file):
                    await self._drop(file)
            await asyncio.sleep(_FILES_PERIOD)

    async def _drop(self, record: StoredFile | Batch) -> None:
        try:
            await self.delete(record)
        except OSError as error:
            log.error("%s cannot be deleted: %s", record.id, error)


async def any_of(*events: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, at most so long.

    Before Python 3.12, ``wait_for`` loses a cancellation that comes together with the event.
    """
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _count(batch: Batch, job: BatchJob) -> None:
    """Bring the numbers that a batch shows up to date."""
    batch.total = len(job.requests.all)
    batch.failed = job.answers.failed
    batch.completed = len(job.answers) - job.answers.failed


def _append_all(job: BatchJob, error: tuple[str, str]) -> None:
    for request in [*job.unanswered()]:
        job.answers.append(answer_line(request.custom_id, error=error))
