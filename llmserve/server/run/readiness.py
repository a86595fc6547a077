"""Waits until a starting server is ready, and finds out which of its models prevent that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from llmserve.errors import ServerError
from llmserve.server.run.ends import End
from llmserve.server.run.log import LoadProgress, ServerLog
from llmserve.server.run.machine import resources
from llmserve.server.run.stubs import CONFIRMATIONS
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings, ports_in_use
from llmserve.server.workarounds import DEATH_REPORTED

OnProgress = Callable[[LoadProgress], None]

_POLL = 0.1


class ModelsFailedError(ServerError):
    """Models that failed to load, and without which the server might start.

    What ``may_be_chance`` has not failed for a reason of its own: on a busy machine, Triton gives
    up on processes that do not respond for a moment, and they end. ``remarks`` is what else is
    known of that: the last words in the log, and what the machine had left.
    """

    def __init__(
        self,
        failures: Mapping[str, str],
        log: ServerLog,
        *,
        may_be_chance: Collection[str] = (),
        remarks: str = "",
    ) -> None:
        self.failures = dict(failures)
        self.may_be_chance = frozenset(may_be_chance)
        self.remarks = remarks
        problems = (f"model {name!r} failed to load: {why}" for name, why in failures.items())
        hint = f"see {log.path}" + (f" ({remarks})" if remarks else "")
        super().__init__("; ".join(problems), hint=hint)


@dataclass
class Readiness:
    """The wait for one server, whose log is ``log``."""

    server: Server
    log: ServerLog
    settings: ServerSettings
    _began: float = field(default_factory=time.monotonic)
    _given_up: set[str] = field(default_factory=set)
    """Models whose processes were killed because Triton had given up on them."""
    _died: dict[str, tuple[float, End]] = field(default_factory=dict)

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
        self._note_ends(progress, now)
        if died := self._died_while_loading(progress, before=now - DEATH_REPORTED):
            raise self._failed(died)
        self._given_up |= stubs.kill_given_up(progress.loading, now)

    def _note_ends(self, progress: LoadProgress, now: float) -> None:
        for name, end in self.server.stubs.poll(progress.loading).items():
            self._died.setdefault(name, (now, end))

    def _failed(self, failures: Mapping[str, str]) -> ModelsFailedError:
        ends = {name: end for name, (_, end) in self._died.items() if name in failures}
        crashed = {name for name, end in ends.items() if not end.may_be_chance} - self._given_up
        # Who has raised an error would raise it again.
        by_chance = (ends.keys() | self.log.unhealthy) - crashed - self.log.raised.keys()
        by_chance &= failures.keys()
        if not (by_chance or ends):
            return ModelsFailedError(failures, self.log)
        words = self.log.printed(self._began)
        failures = {
            name: f"{why} ({ends[name]})" if name in ends and name in self.log.unhealthy else why
            for name, why in failures.items()
        }
        said = f"the last words in the log: {words}" if words else "the log says no more"
        remarks = f"{said}; {resources()}"
        return ModelsFailedError(failures, self.log, may_be_chance=by_chance, remarks=remarks)

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
            for _ in range(CONFIRMATIONS):
                # The log says of a process that has ended only that it is not healthy.
                self._note_ends(progress, time.monotonic())
                time.sleep(_POLL)
            # Without these, it is started again; whatever else has failed would fail again.
            return self._failed(failures | self._died_while_loading(progress, before=math.inf))
        if lost := log.port_lost:
            return ports_in_use(self.settings.host, {lost: getattr(self.server.ports, lost)})
        if log.stuck and log.stuck_model:
            return ModelsFailedError({log.stuck_model: log.stuck}, log)
        if log.stuck:
            problem = f"a model failed to load: {log.stuck}"
        else:
            problem = f"the server ended: {log.why_it_ended() or 'its log is empty'}"
        return ServerError(problem, hint=f"see {log.path}")
