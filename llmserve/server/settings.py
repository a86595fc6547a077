"""The settings of a server, and the ports it listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.contract.container import IMAGE
from llmserve.contract.serve_options import Runtime, ServeOptions
from llmserve.contract.warm_prompt import WarmPrompt
from llmserve.errors import LLMServeError, PortInUseError, ServerError, UsageError
from llmserve.problems import Problem
from llmserve.repository.repository import Repository

if TYPE_CHECKING:
    from llmserve.plugins.roles import Backend

FRONTEND = "frontend"
"""The name of a frontend's port in messages."""


@dataclass(frozen=True)
class ServerSettings:
    """Which repository to serve, how, and where to listen.

    A port of 0 means any free port. ``models`` names the models to load; by default all are loaded.
    ``renewable`` lets the server's owner, and nobody else, load, reload and unload models while it
    runs. A ``partial`` server starts without the models that fail to load, if any is left. When the
    server is stopped, requests in flight have ``grace`` seconds. ``otlp_endpoint`` is where Triton
    sends spans. ``backends``
    are the embedded server's backends besides Triton's own; by default, all that the installed
    plugins register. ``image``, ``gpus`` and ``mounts`` apply only to a container: ``gpus=None``
    gives it the GPUs if Docker has NVIDIA's runtime, and ``mounts`` are folders that models refer
    to. ``replicas`` is the number of servers that share the machine; ``env`` is added to the
    environment.

    >>> ServerSettings(Path("model_repository"), grpc_port=0).host
    '127.0.0.1'
    """

    repository: Path
    runtime: Runtime = ServeOptions.runtime
    host: str = ServeOptions.host
    http_port: int = ServeOptions.http_port
    grpc_port: int = ServeOptions.grpc_port
    metrics_port: int = ServeOptions.metrics_port
    models: tuple[str, ...] = ()
    renewable: bool = False
    partial: bool = False
    log_file: Path | None = ServeOptions.log_file
    ready_timeout: float = 900.0
    grace: float = ServeOptions.grace
    image: str = IMAGE
    gpus: bool | None = None
    mounts: tuple[Path, ...] = ()
    extra_args: tuple[str, ...] = ()
    otlp_endpoint: str = ServeOptions.otlp_endpoint
    backends: tuple[Backend, ...] | None = None
    replicas: int = ServeOptions.replicas
    env: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The tensors for the text in and out of models that others wrote, by the models' names."""
    empty: bool = False
    """Whether a ``renewable`` server starts without any model, to load some later."""
    on_demand: bool = ServeOptions.on_demand
    """Whether a ``renewable`` server loads models when they are needed, so it may have none."""
    certify: bool = ServeOptions.certify
    """Whether who keeps it asks its models their known answers again and again."""
    on_fault: str = ServeOptions.on_fault
    """The command or address that is told of answers that are wrong."""
    warm_prompts: Mapping[str, tuple[WarmPrompt, ...]] = field(default_factory=dict)
    """What each model reads once it is loaded, so that conversations that begin so find it read."""

    def names(self) -> list[str]:
        """Return the models to load."""
        if self.empty:
            return []
        return [*self.models] or [*self.opened.models]

    @cached_property
    def opened(self) -> Repository:
        """What the repository contains, read once; a copy of the settings reads it again."""
        return Repository.open(self.repository)

    def ports(self) -> dict[str, int]:
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


@dataclass(frozen=True)
class Ports:
    """The address and the three ports on which a server listens."""

    host: str
    """A numeric address: with a name such as ``localhost``, Triton never becomes ready."""
    http: int
    grpc: int
    metrics: int


def choose_ports(settings: ServerSettings) -> Ports:
    """Return the ports of the settings, with a free port for each 0.

    Raises one error that names all unavailable ports.
    """
    ports, problems = _try_ports(settings)
    if ports is not None:
        return ports
    first = problems[0]
    raise type(first)(
        "; ".join(dict.fromkeys(error.problem for error in problems)),
        hint="; ".join(dict.fromkeys(error.hint for error in problems if error.hint)),
    )


def port_problems(settings: ServerSettings) -> list[Problem]:
    """Return the problems with the ports of the settings, without keeping any port open."""
    return [Problem.of(error) for error in _try_ports(settings)[1]]


def _try_ports(settings: ServerSettings) -> tuple[Ports | None, list[LLMServeError]]:
    if ":" in settings.host:
        problem = f"llmserve starts Triton only on IPv4, not on {settings.host}"
        hint = "give an IPv4 address of this machine as --host"
        return None, [UsageError(problem, hint=hint)]
    requested = settings.ports()
    fixed = [port for port in requested.values() if port]
    if len(set(fixed)) < len(fixed):
        return None, [UsageError("two of the ports are the same", hint="give each its own, or 0")]
    problems: list[LLMServeError] = []
    taken: dict[str, int] = {}
    bound: dict[str, tuple[str, int]] = {}
    # All listeners stay open until every port is chosen, so that no free port is chosen twice.
    with ExitStack() as listeners:
        for name, port in sorted(requested.items(), key=lambda item: item[1] == 0):
            try:
                listener = listeners.enter_context(_listen(settings.host, port, name))
            except PortInUseError:
                taken[name] = port
            except LLMServeError as error:
                problems.append(error)
            else:
                bound[name] = listener.getsockname()
    if taken:
        problems.insert(0, ports_in_use(settings.host, taken))
    if problems:
        return None, problems
    return Ports(bound["http"][0], **{name: port for name, (_, port) in bound.items()}), []


def free_port(host: str, port: int, name: str = FRONTEND) -> int:
    """Return the port, or a free one for 0; raise if it is unavailable."""
    with _listen(host, port, name) as listener:
        return int(listener.getsockname()[1])


def _listen(host: str, port: int, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Otherwise, recently closed connections of a previous server keep the port in use.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # With SO_REUSEADDR, several sockets may bind to one address, but only one may listen.
        listener.listen(1)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _explain(error, host, port, name) from None
    return listener


def _explain(error: Exception, host: str, port: int, name: str) -> LLMServeError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ports_in_use(host, {name: port})
    if number == errno.EACCES:
        return ServerError(
            f"port {port} for {name} is reserved for root", hint=f"use {_option(name)} 0"
        )
    if isinstance(error, OverflowError):
        return UsageError(f"{port} is not a port", hint=f"use {_option(name)} with 0 to 65535")
    return ServerError(
        f"cannot listen on {host} ({error})", hint="give an IPv4 address of this machine as --host"
    )


def ports_in_use(host: str, ports: Mapping[str, int]) -> PortInUseError:
    """Return one error for all ports that others listen on, by what each is for."""
    each = [f"{port} for {name}" for name, port in ports.items()]
    free = " ".join(f"{_option(name)} 0" for name in ports)
    if len(each) == 1:
        return PortInUseError(
            f"port {each[0]} is in use on {host}", hint=f"{free} picks a free one"
        )
    listed = f"{', '.join(each[:-1])} and {each[-1]}"
    return PortInUseError(f"ports {listed} are in use on {host}", hint=f"{free} picks free ones")


def _option(name: str) -> str:
    """Return the option of ``serve`` for a port; plainly ``--port`` is that of what people use."""
    return "--port" if name == FRONTEND else f"--{name}-port"
