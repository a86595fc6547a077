"""Restarts a Triton that has ended or hangs, at the same ports, with all models that it had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from llmserve.contract.report import State
from llmserve.errors import LLMServeError, ServerError
from llmserve.server.keep.kept import Kept, KeptModel
from llmserve.server.run.readiness import ModelsFailedError
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import start


class Restarter:
    """Ends a Triton that is given up, and restarts one when its wait is over."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._task: asyncio.Task[None] | None = None
        self._has_stopped = False

    def is_busy(self) -> bool:
        """Return whether it was at work when last asked; raise what has ended the work."""
        if self._task is None:
            return False
        if self._task.done():
            task, self._task = self._task, None
            task.result()
        return True

    def check(self, now: float) -> None:
        kept = self._kept
        if kept.given_up and not self._has_stopped:
            # A server that hangs would keep its clients waiting.
            self._has_stopped = True
            self._task = asyncio.create_task(asyncio.to_thread(kept.server.stop, grace=0.0))
        elif kept.triton.state is State.RESTARTING and now >= kept.triton.restart_at:
            kept.triton.loading(now)
            self._task = asyncio.create_task(self._restart())

    async def settle(self) -> None:
        """Wait for the work in progress, which stops early if the kept is ``stopping``."""
        if self._task is not None:
            with suppress(LLMServeError):
                await asyncio.shield(self._task)

    async def _restart(self) -> None:
        kept = self._kept
        await asyncio.to_thread(kept.server.stop, grace=0.0)
        kept.log.read()
        for model in kept.models.values():
            if model.state is not State.UNLOADED and not kept.folder(model.name).is_dir():
                # Alone, so that it does not keep the others from starting.
                model.failed(time.monotonic(), f"{kept.folder(model.name)} is gone")
        left = [model for model in kept.models.values() if not model.state.is_down]
        if not left and not kept.may_be_empty:
            kept.triton.failed(time.monotonic(), "")
            return
        for model in left:
            model.loading(time.monotonic())
        try:
            server = await asyncio.to_thread(
                start,
                self._settings(left),
                on_progress=self._cancel_if_stopping,
                notify=lambda line: kept.notify(f"triton: {line}"),
            )
        except LLMServeError as error:
            self._did_not_start(left, error)
            return
        kept.take_over(server)
        now = time.monotonic()
        kept.triton.loaded(now)
        for model in left:
            model.loads, model.died_at = 0, None
            if why := server.failures.get(model.name):
                model.served = False
                model.failed(now, f"it failed to load: {why}")
            else:
                model.served = True
                model.loaded(now)
                kept.emptied = False

    def _settings(self, left: Sequence[KeptModel]) -> ServerSettings:
        ports = self._kept.server.ports
        return replace(
            self._kept.settings,
            models=tuple(model.name for model in left),
            empty=not left,
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
        )

    def _did_not_start(self, left: Sequence[KeptModel], error: LLMServeError) -> None:
        now = time.monotonic()
        failures = error.failures if isinstance(error, ModelsFailedError) else {}
        for model in left:
            if why := failures.get(model.name):
                model.failed(now, f"it failed to load: {why}")
        self._kept.lost(now, error.problem)

    def _cancel_if_stopping(self, _: object) -> None:
        if self._kept.stopping:
            raise ServerError("interrupted")
