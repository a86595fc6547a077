"""Wait for a server to be ready, and say what stopped it where it is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llmserve.errors import ServerError
from llmserve.server import ports
from llmserve.server.api import ServerApi
from llmserve.server.launch import Own
from llmserve.server.process import ServerProcess
from llmserve.server.progress import Progress, ServerLog
from llmserve.server.settings import ServerSettings

OnProgress = Callable[[Progress], None]

_POLL = 0.1


@dataclass(frozen=True)
class Waiting:
    """A server that was started and has yet to become ready."""

    settings: ServerSettings
    own: Own
    process: ServerProcess
    api: ServerApi
    log: ServerLog

    def until_ready(self, on_progress: OnProgress) -> None:
        """Return when all its models are ready; raise when that will not come."""
        begun = time.monotonic()
        while True:
            # Asked before the log is read: so a server that has ended has its last lines in it.
            ended = self.process.exit_code() is not None
            self.log.read()
            progress = self.log.progress(time.monotonic() - begun)
            if ended or self.log.stuck or (self.log.failures and self._one_failure_ends_it()):
                raise self._failure()
            on_progress(progress)
            if self.api.ready(self.own.name):
                return
            if progress.elapsed > self.settings.ready_timeout:
                raise self._too_late(progress)
            time.sleep(_POLL)

    def _one_failure_ends_it(self) -> bool:
        """Say whether Triton gives up on the first model that fails, as it does by default."""
        lenient = ("--exit-on-error", "--model-load-retry-count")
        return not any(argument.startswith(lenient) for argument in self.settings.extra_args)

    def _failure(self) -> ServerError:
        if failures := self.log.failures.items():
            problem = "; ".join(f"model {name!r} failed to load: {why}" for name, why in failures)
        elif lost := self.log.port_lost:
            return ports.in_use(self.settings.host, getattr(self.own.ports, lost), lost)
        elif self.log.stuck:
            problem = f"a model failed to load: {self.log.stuck}"
        else:
            problem = f"the server ended: {self.log.why_it_ended() or 'it said nothing'}"
        return ServerError(problem, mend=f"see {self.log.path}")

    def _too_late(self, progress: Progress) -> ServerError:
        loading = ", ".join(progress.loading) or "no model"
        return ServerError(
            f"not ready after {self.settings.ready_timeout:g} s (loading: {loading})",
            mend=f"give it more time, or see {self.log.path}",
        )
