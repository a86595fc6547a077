"""One Triton that is watched over: its models, what is seen of them, and what is done about it.

A model is loaded anew by its own Triton, which goes on with the others; where that does not help,
and where Triton itself is gone, Triton is started anew with all of them. What each thing goes
through is in :mod:`llmserve.server.states`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmserve.errors import LLMServeError, RequestRejectedError, ServerError, UsageError
from llmserve.names import near
from llmserve.repository.manifest import model_folders, parts_of
from llmserve.server.launch import POLL
from llmserve.server.log import ServerLog
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import start
from llmserve.server.states import State, Watch
from llmserve.server.stubs import Stubs

if TYPE_CHECKING:
    from llmserve.client import AsyncClient

LOOK = 0.25
"""Seconds between two looks."""
_CANARY_EVERY = 5.0
_CANARY_DEADLINE = 10.0
_BUSY = 0.05
"""A model whose processes use this part of the time works, also where nothing comes of it yet."""
_TAKEN_UP = 15.0 + POLL
"""Seconds after which a Triton that has not begun to load a model anew is stuck."""
_REPORTED = 3.0
"""Seconds for Triton to report that a process has died which was loading a model."""


@dataclass
class _Model(Watch):
    """A model, with what was seen of it when it was last asked to load, or last looked at."""

    loads: int = 0
    died_at: float | None = None
    answers: int = -1
    seconds: float = 0.0
    parts: tuple[str, ...] = ()


@dataclass
class Replica:
    """Watches over a server that has been started with ``settings``, log file included."""

    settings: ServerSettings
    server: Server
    say: Callable[[str], None]
    ending: bool = False
    _models: dict[str, _Model] = field(default_factory=dict)
    _restart: asyncio.Task[None] | None = None
    _client: AsyncClient | None = None
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._canaries = asyncio.create_task(self._send_canaries())
        self._take_over(self.server)
        self._triton = Watch("triton", self.say, State.READY, since=time.monotonic())
        for name, state in self.server.models().items():
            if state == "READY":
                self._models[name] = self._watched(name, State.READY)

    @property
    def given_up(self) -> bool:
        """Whether its Triton is started no more."""
        return self._triton.state is State.FAILED

    @property
    def failed(self) -> bool:
        """Whether nothing is left here that could answer."""
        models = [model.state is State.FAILED for model in self._models.values()]
        return self.given_up or (bool(models) and all(models))

    def why_it_failed(self) -> set[str]:
        """Return what has died too often, and of what."""
        watches = [self._triton, *self._models.values()]
        return {f"{w.name}: {w.why}" for w in watches if w.state is State.FAILED and w.why}

    def say_last_lines(self) -> None:
        for line in self._log.tail:
            self.say(line)

    def status(self) -> dict[str, Any]:
        return {
            "url": self.server.grpc_url,
            "http": self.server.http_url,
            "runtime": self.server.runtime,
            "log": str(self.server.log_file),
            "state": self._triton.state.value,
            "restarts": self._triton.restarts,
            "models": [model.report() for model in self._models.values()],
        }

    async def settle(self) -> None:
        """Have nothing begin any more that would outlive the server."""
        self.ending = True
        self._canaries.cancel()
        if self._restart is not None:
            with suppress(LLMServeError):
                await asyncio.shield(self._restart)
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _watched(self, name: str, state: State) -> _Model:
        return _Model(
            name,
            self.say,
            state,
            since=time.monotonic(),
            loads=self._log.loads[name],
            parts=tuple(parts_of(self.settings.repository, name)),
        )

    def _take_over(self, server: Server) -> None:
        self.server = server
        self._log = ServerLog(server.log_file)
        self._stubs = Stubs(server.pid)

    # What is looked at

    def look(self, now: float) -> None:
        """Take in what has happened, and begin what is to be done about it."""
        if self._restart is not None:
            if self._restart.done():
                restart, self._restart = self._restart, None
                restart.result()
            return
        if self.given_up:
            return
        exit_code = self.server.wait(0)
        self._log.read()
        if exit_code is not None:
            self._lost(now, f"Triton ended, exit code {exit_code}")
        elif self._triton.alive:
            self._look_at_models(now)
        if self.given_up:
            # One that hangs would keep its clients waiting.
            self._restart = asyncio.create_task(asyncio.to_thread(self.server.stop, grace=0.0))
        elif self._triton.state is State.RESTARTING and now >= self._triton.again_at:
            self._triton.loading(now)
            self._restart = asyncio.create_task(self._start_anew())

    def _look_at_models(self, now: float) -> None:
        for name in self._stubs.look():
            if name in self._models:
                self._models[name].died_at = now
        self._stubs.end_given_up(self._log.progress(0).loading, now)
        for model in self._models.values():
            if not self._triton.alive:
                return
            if model.alive and model.died_at is not None:
                model.died(now, "its process has died")
                model.died_at = None
            elif model.state is State.LOADING:
                self._look_at_loading(model, now)
            elif model.state is State.RESTARTING and now >= model.again_at:
                model.loading(now)
                try:
                    self._renew(model)
                except UsageError:
                    self._lost(now, f"{model.name} is loaded anew with all others", fault=False)
                except OSError as error:
                    model.failed(now, f"it cannot be read: {error}")

    def _look_at_loading(self, model: _Model, now: float) -> None:
        if self._log.loads[model.name] > model.loads:
            model.died_at = None
            model.loaded(now)
        elif why := self._log.failures.get(model.name):
            model.died(now, f"it failed to load: {why}")
        elif model.died_at is not None and now - model.died_at > _REPORTED:
            # Triton 2.51 waits for it for ever, and loads nothing else meanwhile.
            model.died_at = None
            model.died(now, "its process died while it was loading")
            self._lost(now, f"Triton waits for {model.name}", fault=False)
        elif now - model.since > _TAKEN_UP and not self._log.progress(0).loading:
            if model.loads:
                self._lost(now, f"Triton does not load {model.name}")
            else:
                # A new one is hardly worth what a start would cost the others.
                model.failed(now, "Triton does not begin to load it")

    # What is done about it

    def _renew(self, model: _Model) -> None:
        # What was said of the one before counts no more.
        self._log.read()
        for part in (*model.parts, model.name):
            self._log.failures.pop(part, None)
            if part in self._models:
                self._models[part].loads = self._log.loads[part]
                self._models[part].died_at = None
            self.server.renew(part)

    def _lost(self, now: float, why: str, *, fault: bool = True) -> None:
        """Have Triton started anew, with all models that have not failed."""
        if fault:
            self._triton.died(now, why)
        else:
            self._triton.waits(now, why)
        for model in self._models.values():
            model.waits(now, why)

    async def _start_anew(self) -> None:
        await asyncio.to_thread(self.server.stop, grace=0.0)
        self._log.read()
        left = [model for model in self._models.values() if model.state is not State.FAILED]
        if not left:
            self._triton.failed(time.monotonic(), "")
            return
        ports = self.server.ports
        settings = replace(
            self.settings,
            models=tuple(model.name for model in left),
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
        )
        log = ServerLog(self.server.log_file)
        for model in left:
            model.loading(time.monotonic())
        try:
            server = await asyncio.to_thread(start, settings, on_progress=self._still_wanted)
        except LLMServeError as error:
            now = time.monotonic()
            log.read()
            for model in left:
                if why := log.failures.get(model.name):
                    model.failed(now, f"it failed to load: {why}")
            self._lost(now, error.problem)
            return
        self._take_over(server)
        now = time.monotonic()
        self._triton.loaded(now)
        for model in left:
            model.loads, model.died_at, model.answers = 0, None, -1
            model.loaded(now)

    def _still_wanted(self, _: object) -> None:
        if self.ending:
            raise ServerError("interrupted")

    # Canaries

    async def _send_canaries(self) -> None:
        while True:
            await asyncio.sleep(_CANARY_EVERY)
            if not self._triton.alive:
                continue
            try:
                await self._canaries_of_all()
            except ServerError as error:
                self._triton.missed(time.monotonic(), str(error))
            else:
                self._triton.answered(time.monotonic())

    async def _canaries_of_all(self) -> None:
        """Ask each model that has done nothing of late for a token."""
        answers = await asyncio.to_thread(self.server.answers)
        parts = {part for model in self._models.values() for part in model.parts}
        idle = []
        for name, model in self._models.items():
            if model.alive and name not in parts:
                if self._has_worked(model, answers):
                    model.answered(time.monotonic())
                else:
                    idle.append(self._canary(model))
        await asyncio.gather(*idle)
        answers = await asyncio.to_thread(self.server.answers)
        self._looked = time.monotonic()
        for name, model in self._models.items():
            model.answers, model.seconds = answers.get(name, -1), self._seconds(model)

    def _has_worked(self, model: _Model, answers: Mapping[str, int]) -> bool:
        """Say whether a model has answered since it was last looked at, or works for it."""
        used = self._seconds(model) - model.seconds
        busy = self._looked and used > _BUSY * (time.monotonic() - self._looked)
        return bool(busy) or answers.get(model.name, -1) > model.answers >= 0

    def _seconds(self, model: _Model) -> float:
        return sum(self._stubs.seconds(part) for part in (*model.parts, model.name))

    async def _canary(self, model: _Model) -> None:
        if self._client is None:
            from llmserve.client import connect_async

            self._client = connect_async(self.server.grpc_url)
        try:
            info = await self._client.model(model.name)
            if "text_input" not in info.inputs or "text_output" not in info.outputs:
                return
            await self._client.generate(model.name, "a", max_tokens=1, timeout=_CANARY_DEADLINE)
        except LLMServeError as error:
            # Whoever refuses a request lives.
            refused = isinstance(error, RequestRejectedError) and "has died" not in error.problem
            answers = {} if refused else await asyncio.to_thread(self.server.answers)
            if not refused and not self._has_worked(model, answers):
                model.missed(time.monotonic(), error.problem)
                return
        model.answered(time.monotonic())

    # What somebody asks for

    async def reload(self, name: str) -> None:
        """Load a model anew, or for the first time; the old one answers until the new one does."""
        repository = self.settings.repository
        known = [path.name for path in model_folders(repository)]
        # A path will not do: an empty name, or a dot, is the repository itself.
        if name not in known:
            raise ServerError(f"no model {name!r} in {repository}", mend=near(name, known))
        if not self.server.renewable:
            raise ServerError("this Triton cannot load a model anew", mend="stop and start it")
        if not self._triton.alive:
            raise ServerError("Triton is being started anew", mend="wait until it is ready")
        from llmserve.repository.check import check_repository

        # Triton says nothing of a configuration that it cannot read, and is started anew for
        # naught: that would end the others too.
        here = self.settings.runtime == "embedded"
        check = partial(check_repository, models=[name], quick=True, served_here=here)
        for problem in await asyncio.to_thread(check, repository):
            if problem.fatal:
                raise ServerError(str(problem))
        parts = (*parts_of(repository, name), name)
        for part in parts:
            if part not in self._models:
                self._models[part] = self._watched(part, State.LOADING)
        self._models[name].parts = parts[:-1]
        noted = Counter({part: self._log.loads[part] for part in parts})
        for part in parts:
            self._models[part].asked_for(time.monotonic())
        self._renew(self._models[name])
        while not all(self._log.loads[part] > noted[part] for part in parts):
            await asyncio.sleep(LOOK)
            for part in parts:
                if why := self._log.failures.get(part):
                    raise ServerError(
                        f"model {part!r} failed to load: {why}",
                        mend="the old one serves on, if there was one",
                    )
                if self._models[part].state is State.FAILED:
                    raise ServerError(f"model {part!r}: {self._models[part].why}")
            if not self._triton.alive or self.ending:
                raise ServerError("Triton ended meanwhile", mend="see `llmserve status`")
