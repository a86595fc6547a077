"""The frontends that `serve` starts in front of Triton, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmserve.errors import LLMServeError, PluginError, UsageError, reason

if TYPE_CHECKING:
    from llmserve.plugin import Frontend, Place

_NONE = "none"


@dataclass
class RequestedFrontends:
    """The frontends that the user named, or those that their packages start by default."""

    names: tuple[str, ...]
    port: int | None
    place: Place
    """Where each frontend listens, still without its port and without Triton's address."""
    places: list[tuple[Frontend, Place]] = field(default_factory=list)
    """Each frontend with its place, once that is chosen."""

    def choose_places(self, tritons: Mapping[str, int]) -> None:
        """Choose the port of each frontend; raise if it is unavailable or the frontend refuses.

        ``tritons`` are the ports that Triton will take.
        """
        from llmserve.plugin import install_command
        from llmserve.server import free_port

        chosen = self._chosen()
        if self.port and not chosen:
            raise UsageError(
                "--port is for a frontend, and there is none",
                hint=f"{install_command('llmserve-gateway')} for the OpenAI API, or leave it out",
            )
        for frontend in chosen:
            port = self._port_of(frontend)
            for name in (name for name, number in tritons.items() if port and number == port):
                raise UsageError(
                    f"port {port} is for Triton's {name} and for {frontend.name}",
                    hint=f"choose another --port, or --{name}-port 0",
                )
            place = replace(self.place, port=free_port(self.place.host, port))
            # The frontend refuses invalid settings here, before anything is started.
            try:
                frontend.arguments(place)
            except LLMServeError:
                raise
            except Exception as error:
                raise PluginError(
                    f"frontend {frontend.name!r} cannot be started: {reason(error)}",
                    hint="leave it out with --frontend, and report it to its plugin's author",
                ) from None
            self.places.append((frontend, place))

    def ports(self) -> list[int]:
        """Return the ports that were asked for, 0 for any."""
        return [self._port_of(frontend) for frontend in self._chosen()]

    def hosts(self) -> list[str]:
        """Return where the frontends listen, once their places are chosen."""
        return [place.host for _, place in self.places]

    def _port_of(self, frontend: Frontend) -> int:
        return frontend.port if self.port is None else self.port

    def _chosen(self) -> list[Frontend]:
        from llmserve.plugin import Frontend, Registry

        if self.names == (_NONE,):
            return []
        registry = Registry.load()
        chosen = [registry.get(Frontend, name) for name in self.names]
        if not chosen:
            chosen = [frontend for frontend in registry.all(Frontend) if frontend.default]
        if len(chosen) > 1 and self.port:
            raise UsageError(
                f"{' and '.join(frontend.name for frontend in chosen)} cannot share a port",
                hint="choose one of them with --frontend, or use --port 0",
            )
        return chosen
