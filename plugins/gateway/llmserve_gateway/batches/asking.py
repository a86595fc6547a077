"""Asks the gateway's own application for lines of batches, when there is room beside all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from llmserve.client import BatchJob, BatchLine, BatchReply, in_thread
from llmserve.errors import RequestRejectedError
from llmserve_gateway.batches.calls import Call
from llmserve_gateway.batches.folder import EVERYONE
from llmserve_gateway.bodies import MAX_BYTES, MAX_IMAGE_BYTES
from llmserve_gateway.errors import ApiError
from llmserve_gateway.keys import BatchKey

if TYPE_CHECKING:
    from llmserve_gateway.gateway import Gateway
    from llmserve_gateway.headers import AsgiApp

QUIET = 1.0
"""Seconds without other requests after which batches are alone; conversations have pauses."""
LOAD_QUIET = 30.0
"""Seconds after which a model is loaded for a batch, and another may have to make place for it:
conversations come back to theirs."""
ADVANCE = 10.0
"""After so many seconds without an answer, a batch has one request beside any others."""
_PAUSE = 2.0
"""Seconds after which it is seen again whether a model may be loaded."""
_PAUSE_OF_LARGE = 0.5
"""Seconds after which it is seen again whether there is room for images."""


class Asking:
    """The gateway as the engine of batches asks it; it makes room for who asks it directly."""

    def __init__(
        self, gateway: Gateway, app: AsgiApp, is_full: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._gateway = gateway
        self._app = app
        self._is_full = is_full
        """Whether a key may have no more answers."""
        self._calls: dict[Call, BatchJob] = {}
        """Those in flight, in the order in which they began."""
        self._charged: WeakKeyDictionary[BatchLine, tuple[bool, int]] = WeakKeyDictionary()
        """Whether each line counts against the limits of its key already, and how many tokens of
        answers to it do."""
        limits = gateway.settings.limits
        self._most = max(1, min(limits.batch_requests, limits.max_requests // 2))
        self._beside = min(limits.batch_beside, self._most)
        self._most_bytes = max(self._most * MAX_BYTES, MAX_BYTES + MAX_IMAGE_BYTES)
        """What lines that are asked have together: of text as many as may run, of images fewer."""
        self._bytes = 0
        self._width = self._most
        """How many run while batches are alone: fewer after they had to make room."""
        self._answered = 0.0
        """When the last line had its answer."""
        before = gateway.admission.on_arrival

        def make_room() -> None:
            # A release makes room as well.
            before()
            self._make_room()

        gateway.admission.on_arrival = make_room

    def room(self) -> int:
        """Return how many requests of batches may run now."""
        if self._gateway.admission.draining:
            return 0
        return self._width if self._is_quiet(QUIET) else self._kept()

    async def ask(self, line: BatchLine) -> BatchReply | None:
        job, model = line.job, await self._model_of(line.request.model)
        if (key := self.key_of(job.owner)) is None:
            job.is_held = True
            return None
        if self._is_full(job.owner):
            what = "the key has too many files: delete some"
            raise RequestRejectedError(what, code="storage_full")
        if not await self._needs_no_place(model):
            job.hold(line.request.model, asyncio.get_running_loop().time() + _PAUSE)
            return None
        size = line.request.size
        if self._bytes and self._bytes + size > self._most_bytes:
            job.hold(line.request.model, asyncio.get_running_loop().time() + _PAUSE_OF_LARGE)
            return None
        self._bytes += size
        try:
            return await self._ask(line, key)
        finally:
            self._bytes -= size

    async def _ask(self, line: BatchLine, key: BatchKey) -> BatchReply | None:
        job = line.job
        body = await in_thread(line.body)
        if job.is_stopped or not (line.is_alone or len(self._calls) < self.room()):
            # Others have come, or it was told to stop, while the body was read.
            return None
        key.is_charged, key.answer_tokens = self._charged.get(line, (False, 0))
        key.may_load = self._is_quiet(LOAD_QUIET)
        call = Call(self._app, line.request.endpoint, body, key)
        self._calls[call] = job
        try:
            return await call.answer()
        finally:
            del self._calls[call]
            self._charged[line] = (key.is_charged, key.answer_tokens)

    async def is_ready(self, model: str) -> bool:
        state, model = await self._gateway.catalog.state(), await self._model_of(model)
        is_ready = bool(state["models"].get(model, {}).get("ready"))
        return is_ready and await self._needs_no_place(model)

    async def may_come(self, model: str) -> bool:
        """Return whether a model that is not there may come: nothing is there, or it is known."""
        catalog, named = self._gateway.catalog, self._gateway.settings.models
        model = await self._model_of(model)
        if named and model not in named:
            return False  # `serve` has it, and this gateway will never offer it.
        if any(report.name == model for report in await catalog.supervised()):
            return True
        return not (await catalog.state())["models"]

    async def has_come(self, model: str) -> bool:
        return await self.is_ready(model)

    async def is_there(self) -> bool:
        return True

    def note_answer(self) -> None:
        self._width = min(self._most, self._width + 1)
        self._answered = asyncio.get_running_loop().time()

    def leave(self, job: BatchJob) -> None:
        for call, owner in self._calls.items():
            if owner is job:
                call.leave()

    def key_of(self, owner: str) -> BatchKey | None:
        """Return the key of a batch as it is now, None if it has been withdrawn."""
        keys = self._gateway.keys
        if keys is None:
            return BatchKey("", "") if owner == EVERYONE else None
        key = keys.of_hash(owner)
        return None if key is None else BatchKey(**vars(key))

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

    async def _model_of(self, name: str) -> str:
        """Return the model that a line names, or an adapter of which it names."""
        try:
            return (await self._gateway.names.find(name, None)).model
        except ApiError:
            # It names an adapter of several models, which its own answer says.
            return name

    async def _needs_no_place(self, model: str) -> bool:
        """Return whether a model may be asked now, since it has not to be loaded or may be."""
        if self._gateway.loads is None or self._is_quiet(LOAD_QUIET):
            return True
        reports = await self._gateway.catalog.supervised()
        return all(
            report.name != model or report.demand is None or report.demand.loaded
            for report in reports
        )
