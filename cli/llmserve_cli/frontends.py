"""What `serve` starts before Triton: which frontends, and where each listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmserve.errors import LLMServeError, PluginError, ServerError, UsageError, reason

if TYPE_CHECKING:
    from llmserve.roles import Frontend, Place
    from llmserve.server import Server
    from llmserve.server.frontend import RunningFrontend

_NONE = "none"


@dataclass
class Wanted:
    """The frontends that were asked for, or all that are installed."""

    names: tuple[str, ...]
    port: int | None
    place: Place
    """Where each is to listen, but for its port, and without what it is to stand before."""
    _places: list[tuple[Frontend, Place]] = field(default_factory=list)

    def choose_places(self) -> None:
        """Choose where each is to listen; what keeps one from that is raised."""
        from llmserve.server.settings import free_port

        for frontend in self._chosen():
            asked = frontend.port if self.port is None else self.port
            place = replace(self.place, port=free_port(self.place.host, asked, "frontend"))
            # It refuses what it does not want before anything is started.
            try:
                frontend.command(place)
            except LLMServeError:
                raise
            except Exception as error:
                raise PluginError(
                    f"frontend {frontend.name!r} cannot be started: {reason(error)}",
                    mend="leave it out with --frontend, and tell its plugin's author",
                ) from None
            self._places.append((frontend, place))

    @contextmanager
    def started(
        self, servers: Sequence[Server], models: tuple[str, ...], *, keep_logs: bool
    ) -> Iterator[list[RunningFrontend]]:
        """Start them before all servers, and end them where whoever watches has not."""
        from llmserve.server.control import control_socket
        from llmserve.server.frontend import log_beside, start_frontend

        server, others = servers[0], servers[1:]
        status = None
        with suppress(OSError, ServerError):
            # Whoever watches says why there is none.
            status = control_socket(server.grpc_url)
        running = []
        with ExitStack() as stack:
            for frontend, place in self._places:
                place = replace(
                    place,
                    url=server.grpc_url,
                    metrics=server.metrics_url,
                    models=models,
                    status=status,
                    replicas=tuple(other.grpc_url for other in others),
                    replica_metrics=tuple(other.metrics_url for other in others),
                )
                log = log_beside(server.log_file, frontend)
                running.append(start_frontend(frontend, place, log))
                stack.callback(running[-1].stop, 0.0)
            yield running
        if not keep_logs:
            for front in running:
                front.log_file.unlink(missing_ok=True)

    def _chosen(self) -> list[Frontend]:
        from llmserve.registry import Registry
        from llmserve.roles import Frontend

        if self.names == (_NONE,):
            return []
        registry = Registry.load()
        chosen = [registry.get(Frontend, name) for name in self.names] or registry.all(Frontend)
        if len(chosen) > 1 and self.port:
            raise UsageError(
                f"one port for {' and '.join(frontend.name for frontend in chosen)}",
                mend="name the one that is to have it with --frontend, or give --frontend-port 0",
            )
        return chosen
