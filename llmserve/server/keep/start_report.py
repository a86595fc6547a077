"""What ``serve`` reports about itself until its supervisor runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import ServerError
from llmserve.server.keep.states import Watch
from llmserve.server.run.log import LoadProgress
from llmserve.server.settings import ServerSettings


class StartReport:
    """The state of a server whose models are being loaded."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._state = State.LOADING
        self._models = {name: Watch(name) for name in settings.names()}

    def follow(self, progress: LoadProgress) -> None:
        """Record which models are ready."""
        for name in progress.ready:
            self._models.setdefault(name, Watch(name)).loaded(0.0)

    def done(self, failures: Mapping[str, str]) -> None:
        """Record which models have failed and that all others are ready; frontends still start."""
        self._state = State.READY
        for name, model in self._models.items():
            if why := failures.get(name):
                model.failed(0.0, why)
            else:
                model.loaded(0.0)

    async def answer(self, request: Mapping[str, Any]) -> ServerReport:
        """Answer a request at the control socket."""
        if request.get("do") != "status":
            raise ServerError("the server is still loading", hint="wait until it is ready")
        host, port = self._settings.host, self._settings.grpc_port
        address = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
        # Another thread adds models meanwhile.
        models = (
            ModelReport(
                m.name, m.state, m.why, code=m.code,
                reading=m.alive and m.name in self._settings.warm_prompts,
            )
            for m in [*self._models.values()]
        )  # fmt: skip
        return ServerReport(
            self._state,
            # A free port is not chosen yet.
            url=f"{address}:{port}" if port else "",
            runtime=self._settings.runtime,
            log=str(self._settings.log_file or ""),
            models=tuple(models),
            pid=os.getpid(),
            repository=str(self._settings.repository.resolve()),
        )
