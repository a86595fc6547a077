"""Waits until a starting server is ready, and finds out which of its models prevent that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmserve.errors import ServerError
from llmserve.server.run.log import LoadProgress, ServerLog
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings, port_in_use
from llmserve.server.workarounds import DEATH_REPORTED

OnProgress = Callable[[LoadProgress], None]

_POLL = 0.1


class ModelsFailedError(ServerError):
    """Models that failed to load, and without which the server might start."""

    def __init__(self, failures: Mapping[str, str], log: ServerLog) -> None:
        self.failures = dict(failures)
        problems = (f"model {name!r} failed to load: {why}" for name, why in failures.items())
        super().__init__("; ".join(problems), hint=f"see {log.path}")


class UnresponsiveError(ServerError):
    """A model's process did not respond for a moment while it loaded, and Triton gave up on it."""


@dataclass
class Readiness:
    """The wait for one server, whose log is ``log``."""

    server: Server
    log: ServerLog
    settings: ServerSettings
    _began: float = field(default_factory=time.monotonic)
    _given_up: set[str] = field(default_factory=set)
    """Models whose processes were killed because Triton had given up on them."""
    _died: dict[str, tuple[float, str]] = field(default_factory=dict)

    def wait(self, on_progress: OnProgress) -> None:
        """Return when all models are ready; raise as soon as one cannot become ready."""
        while not self._ready(on_progress):
            time.sleep(_POLL)
        # A process that dies later was seen alive here.
        self.server.stubs.poll()

    def _ready(self, on_progress: OnProgress) -> bool:
        # Checked before reading the log, so that the log is complete if the server has ended.
        ended = not self.server.alive()
        self.log.read()
        now = time.monotonic()
        progress = self.log.progress(now - self._began)
        failed = self.log.raised or self.log.failures
        if ended or self.log.stuck or (failed and self._strict):
            raise self._failure(progress)
        self._watch_processes(progress, now)
        on_progress(progress)
        if self.server.ready():
            return True
        if progress.elapsed > self.settings.ready_timeout:
            loading = ", ".join(progress.loading) or "no model"
            raise ServerError(
                f"not ready after {self.settings.ready_timeout:g} s (loading: {loading})",
                hint=f"allow more time, or see {self.log.path}",
            )
        return False

    @property
    def _strict(self) -> bool:
        """Whether Triton exits when the first model fails, as it does by default."""
        lenient = ("--exit-on-error", "--model-load-retry-count")
        return not any(argument.startswith(lenient) for argument in self.settings.extra_args)

    def _watch_processes(self, progress: LoadProgress, now: float) -> None:
        """End what Triton waits for; raise for what it waits for in vain."""
        stubs = self.server.stubs
        for name, how in stubs.poll(progress.loading).items():
            self._died.setdefault(name, (now, how))
        if died := self._died_while_loading(progress, before=now - DEATH_REPORTED):
            raise ModelsFailedError(died, self.log)
        self._given_up |= stubs.kill_given_up(progress.loading, now)

    def _died_while_loading(self, progress: LoadProgress, before: float) -> dict[str, str]:
        """Return what keeps Triton from becoming ready (workarounds.DIED_LOADING)."""
        return {
            name: f"its process died while it was loading ({how})"
            for name, (when, how) in self._died.items()
            if name in progress.loading and when < before
        }

    def _failure(self, progress: LoadProgress) -> ServerError:
        log = self.log
        if failures := {**log.raised, **log.failures}:
            if failures.keys() <= self._given_up & log.unhealthy:
                error = ModelsFailedError(failures, log)
                return UnresponsiveError(error.problem, hint=error.hint)
            # Without these, it is started again; whatever else has failed would fail again.
            return ModelsFailedError(
                failures | self._died_while_loading(progress, before=math.inf), log
            )
        if lost := log.port_lost:
            return port_in_use(self.settings.host, getattr(self.server.ports, lost), lost)
        if log.stuck and log.stuck_model:
            return ModelsFailedError({log.stuck_model: log.stuck}, log)
        if log.stuck:
            problem = f"a model failed to load: {log.stuck}"
        else:
            problem = f"the server ended: {log.why_it_ended() or 'its log is empty'}"
        return ServerError(problem, hint=f"see {log.path}")
