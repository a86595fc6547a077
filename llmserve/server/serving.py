"""Serves a repository from its start to its end: Tritons, frontends, and who keeps them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmserve.errors import ServerError
from llmserve.server.keep.control import announced
from llmserve.server.keep.desired import OnDemand
from llmserve.server.keep.start_report import StartReport
from llmserve.server.keep.supervisor import Supervisor
from llmserve.server.run.frontend import RunningFrontend, log_beside, start_frontend
from llmserve.server.run.log import LoadProgress
from llmserve.server.run.readiness import OnProgress
from llmserve.server.server import Server
from llmserve.server.settings import ServerSettings
from llmserve.server.startup import one_log, settings_of_each, start_all

if TYPE_CHECKING:
    from llmserve.plugins.roles import Frontend, Place

Notify = Callable[[str], None]


@dataclass
class Serving:
    """Tritons that serve the same models, and the frontends in front of them, all of which answer.

    Created by :func:`start_serving`.
    """

    servers: Sequence[Server]
    frontends: Sequence[RunningFrontend]
    _supervisor: Supervisor
    _problems: Sequence[str]

    def run(self, notify: Notify) -> None:
        """Keep them answering until SIGTERM or Ctrl-C, then stop them in order.

        Raises :class:`ServerError` if nothing is left that could answer.
        """
        self._supervisor.notify = notify
        self._supervisor.run()

    @property
    def log_files(self) -> list[Path | None]:
        return [replica.log_file for replica in self._supervisor.settings]

    @property
    def went_wrong(self) -> list[str]:
        """What has not gone as it should, so that the logs are kept."""
        return list(dict.fromkeys([*self._problems, *self._supervisor.went_wrong]))


@contextmanager
def start_serving(
    settings: ServerSettings,
    frontends: Sequence[tuple[Frontend, Place]] = (),
    *,
    models: Sequence[str] = (),
    left_out: Mapping[str, str] = MappingProxyType({}),
    on_demand: OnDemand | None = None,
    offered: Sequence[str] = (),
    on_progress: OnProgress = lambda _: None,
    notify: Notify = lambda _: None,
) -> Iterator[Serving]:
    """Start all replicas, with frontends that offer ``models``; stop at the end what still runs.

    Other commands find it from now on. ``left_out`` says which models are not served, and why;
    ``offered`` are those that are loaded ``on_demand``.
    """
    problems = [f"{name} was left out: {why}" for name, why in left_out.items()]
    up: Serving | None = None

    def keeps_logs() -> bool:
        return bool(up.went_wrong if up is not None else problems)

    def notify_of_start(line: str) -> None:
        problems.append(line)
        notify(line)

    with ExitStack() as stack:
        replicas = [
            stack.enter_context(one_log(replica, keep=keeps_logs))
            for replica in settings_of_each(settings)
        ]
        loading = StartReport(replicas[0])
        control = stack.enter_context(_announced(loading, notify))

        def follow(progress: LoadProgress) -> None:
            loading.follow(progress)
            on_progress(progress)

        servers = start_all(replicas, on_progress=follow, notify=notify_of_start)
        loading.done(servers[0].failures)
        for server in servers:
            server.failures = {**left_out, **server.failures}
            stack.enter_context(server)
        tritons = tuple(server.address for server in servers)
        places = [
            (each, replace(place, tritons=tritons, models=tuple(models), status=control))
            for each, place in frontends
        ]
        chosen = settings.log_file is not None
        running = stack.enter_context(
            _started(places, servers[0].log_file, lambda: chosen or keeps_logs(), chosen=chosen)
        )
        supervisor = Supervisor(
            replicas, servers, running, control=control, on_demand=on_demand, offered=offered
        )
        up = Serving(servers, running, supervisor, problems)
        yield up


@contextmanager
def _announced(loading: StartReport, notify: Notify) -> Iterator[Path | None]:
    """List the server for the commands that look for one, from now on."""
    with ExitStack() as stack:
        path = None
        try:
            path = stack.enter_context(announced(loading.answer))
        except (OSError, ServerError) as error:
            notify(f"note: `llmserve status` and others will not see this server: {error}")
        yield path


@contextmanager
def _started(
    places: Sequence[tuple[Frontend, Place]],
    log_file: Path,
    keeps_logs: Callable[[], bool],
    *,
    chosen: bool,
) -> Iterator[list[RunningFrontend]]:
    """Start frontends, with logs beside the server's; stop those that still run at the end."""
    running: list[RunningFrontend] = []
    with ExitStack() as stack:
        for frontend, place in places:
            log = log_beside(log_file, frontend, chosen=chosen)
            running.append(start_frontend(frontend, place, log))
            stack.callback(running[-1].stop, 0.0)
        yield running
    if not keeps_logs():
        for front in running:
            front.log_file.unlink(missing_ok=True)
