"""Carries out what is decided. What comes of it is seen in a later picture, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llmserve.errors import LLMServeError, ServerError, reason
from llmserve.server.keep import actions
from llmserve.server.keep.actions import Action
from llmserve.server.keep.desired import Hold
from llmserve.server.keep.observe import FrontendHandle, RunningTriton
from llmserve.server.keep.picture import StartPicture
from llmserve.server.run.frontend import start_again
from llmserve.server.run.readiness import ModelsFailedError
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import start


class Actor:
    """Acts on these Tritons and frontends; ``notify`` is called with lines for the operator."""

    def __init__(
        self,
        tritons: Sequence[RunningTriton],
        frontends: Sequence[FrontendHandle],
        notify: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._tritons = tritons
        self._frontends = frontends
        self._notify = notify
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def act(self, actions_: Iterable[Action]) -> None:
        for action in actions_:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case actions.Tell(line, triton):
                self._tell(line, triton)
            case actions.Grant(hold):
                hold.grant()
            case actions.Inform(hold, place, going):
                hold.change(place, going=going)
            case actions.Refuse(whom, error):
                if isinstance(whom, Hold):
                    whom.refuse(error)
                elif not whom.done.done():
                    whom.done.set_exception(error)
            case actions.Fulfil(order):
                if not order.done.done():
                    order.done.set_result(None)
            case actions.StartFrontend(number):
                self._frontends[number].is_busy = True
                self._begin(self._start_frontend(self._frontends[number]))
            case _:
                self._act_on_triton(action, self._tritons[action.triton])

    def _act_on_triton(
        self,
        action: actions.Start
        | actions.Stop
        | actions.Load
        | actions.Drop
        | actions.Kill
        | actions.StopTrying,
        running: RunningTriton,
    ) -> None:
        match action:
            case actions.Load(models=names):
                self._load(running, names)
            case actions.Drop(models=names):
                for name in names:
                    # It may have been withdrawn meanwhile, which is the same. A Triton that cannot
                    # unload it any more is restarted without it.
                    with suppress(OSError, LLMServeError):
                        running.server.drop(name)
            case actions.Kill(model=name, processes=processes, is_death=is_death):
                running.server.stubs.kill(name, processes, is_death=is_death)
            case actions.StopTrying(model=name, loaded_before=before):
                running.withdrawn.add(name)
                self._begin(self._stop_trying(running, name, loaded_before=before))
            case actions.Start(number, names):
                running.is_busy = True
                self._begin(self._start(running, number, names))
            case actions.Stop():
                running.is_busy = True
                self._begin(self._stop(running))

    async def settle(self) -> None:
        """Wait for what is under way; a start is cut short."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()

    def _tell(self, line: str, triton: int | None) -> None:
        self._notify(line if triton is None else f"replica {triton + 1}: {line}")

    # What takes time

    def _load(self, running: RunningTriton, names: Sequence[str]) -> None:
        # Log lines about the previous models no longer count.
        running.log.read()
        for name in names:
            running.log.forget(name)
            running.not_asked.pop(name, None)
        for name in names:
            try:
                running.server.renew(name)
            except (OSError, LLMServeError) as error:
                # One of the system: Triton is told by files, for which there may be no place.
                running.not_asked[name] = _why(error)
                return

    async def _stop_trying(self, running: RunningTriton, name: str, *, loaded_before: bool) -> None:
        """See workarounds.TRIED_AGAIN."""
        server = running.server
        try:
            await asyncio.to_thread(server.stop_trying, name, loaded_before=loaded_before)
        finally:
            running.withdrawn.discard(name)

    async def _stop(self, running: RunningTriton) -> None:
        try:
            await asyncio.to_thread(running.server.stop, grace=0.0)
        finally:
            running.is_busy = False

    async def _start(self, running: RunningTriton, number: int, names: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(running.server.stop, grace=0.0)
            server = await asyncio.to_thread(
                start,
                _settings(running, names),
                on_progress=self._cancel_if_stopping,
                notify=lambda line: self._tell(f"triton: {line}", self._number_of(number)),
            )
        except Exception as error:  # whatever it is, it is tried again, and given up at last
            failures = error.failures if isinstance(error, ModelsFailedError) else {}
            running.start = StartPicture(_why(error), failures)
        else:
            running.take_over(server)
            running.start = StartPicture("", server.failures, server.renewable)
        finally:
            running.is_busy = False

    def _number_of(self, triton: int) -> int | None:
        return triton if len(self._tritons) > 1 else None

    def _cancel_if_stopping(self, _: object) -> None:
        if self._is_stopping:
            raise ServerError("interrupted")

    async def _start_frontend(self, handle: FrontendHandle) -> None:
        try:
            handle.running = await asyncio.to_thread(
                start_again, handle.running, self._cancel_if_stopping
            )
            handle.start = StartPicture()
        except Exception as error:  # whatever it is, it is tried again
            handle.start = StartPicture(_why(error))
        finally:
            handle.is_busy = False


def _why(error: Exception) -> str:
    return error.problem if isinstance(error, LLMServeError) else reason(error)


def _settings(running: RunningTriton, names: Sequence[str]) -> ServerSettings:
    ports = running.server.ports
    return replace(
        running.settings,
        models=tuple(names),
        empty=not names,
        http_port=ports.http,
        grpc_port=ports.grpc,
        metrics_port=ports.metrics,
    )
