"""What a server is started with, and the ports it listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmserve.errors import LLMServeError, PortInUseError, ServerError, UsageError
from llmserve.repository.dockerfile import IMAGE

if TYPE_CHECKING:
    from llmserve.roles import Backend

Runtime = Literal["auto", "embedded", "binary", "docker"]


@dataclass(frozen=True)
class ServerSettings:
    """Which repository to serve, how, and where to listen.

    A port of 0 means a free one. ``models`` names the models to load; without it all are loaded.
    ``explicit`` loads nothing but ``models`` and lets :meth:`Server.load` and
    :meth:`Server.unload` change that at run time. ``renewable`` lets :meth:`Server.renew` load a
    model anew, and opens nothing to anybody else. When the server is stopped, requests in flight
    have ``grace`` seconds. ``backends`` are what the embedded server has
    beside Triton's own; without it, all that the installed plugins register. ``image``, ``gpus``
    and ``mounts`` matter to a container only: ``gpus=None`` gives it the GPUs where Docker has
    NVIDIA's runtime, and ``mounts`` are folders that models refer to. ``replicas`` are so many
    servers that share the machine; ``env`` is added to the environment.

    >>> ServerSettings(Path("model_repository"), grpc_port=0).host
    '127.0.0.1'
    """

    repository: Path
    runtime: Runtime = "auto"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    models: tuple[str, ...] = ()
    explicit: bool = False
    renewable: bool = False
    log_file: Path | None = None
    ready_timeout: float = 900.0
    grace: float = 30.0
    image: str = IMAGE
    gpus: bool | None = None
    mounts: tuple[Path, ...] = ()
    extra_args: tuple[str, ...] = ()
    backends: tuple[Backend, ...] | None = None
    replicas: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def ports(self) -> dict[str, int]:
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


@dataclass(frozen=True)
class Ports:
    """Where a server listens: one address, three ports."""

    host: str
    """In digits: given a name such as ``localhost``, Triton never becomes ready."""
    http: int
    grpc: int
    metrics: int


def choose_ports(settings: ServerSettings) -> Ports:
    """Return the ports asked for, with a free one wherever 0 was asked for.

    Raises one error that names every port that cannot be had.
    """
    chosen, problems = _try_ports(settings)
    if chosen is not None:
        return chosen
    first = problems[0]
    raise type(first)(
        "; ".join(dict.fromkeys(error.problem for error in problems)),
        mend="; ".join(dict.fromkeys(error.mend for error in problems if error.mend)),
    )


def port_problems(settings: ServerSettings) -> list[LLMServeError]:
    """Return what is wrong with the ports asked for, without keeping any of them."""
    return _try_ports(settings)[1]


def _try_ports(settings: ServerSettings) -> tuple[Ports | None, list[LLMServeError]]:
    if ":" in settings.host:
        problem = f"a Triton is started on IPv4 alone, not on {settings.host}"
        mend = "give an IPv4 address of this machine as --host"
        return None, [UsageError(problem, mend=mend)]
    asked = settings.ports()
    fixed = [port for port in asked.values() if port]
    if len(set(fixed)) < len(fixed):
        return None, [UsageError("two of the ports are the same", mend="give each its own, or 0")]
    problems: list[LLMServeError] = []
    bound: dict[str, tuple[str, int]] = {}
    # All are held until each is known, so that no free port is found twice.
    with ExitStack() as held:
        for name, port in sorted(asked.items(), key=lambda item: item[1] == 0):
            try:
                listener = held.enter_context(_listen(settings.host, port, name))
            except LLMServeError as error:
                problems.append(error)
            else:
                bound[name] = listener.getsockname()
    if problems:
        return None, problems
    return Ports(bound["http"][0], **{name: port for name, (_, port) in bound.items()}), []


def free_port(host: str, port: int, name: str) -> int:
    """Return the port, or a free one for 0; raise where it cannot be had."""
    with _listen(host, port, name) as listener:
        return int(listener.getsockname()[1])


def _listen(host: str, port: int, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Otherwise a connection of the last server that has just been closed counts as taken.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may be bound to one address with SO_REUSEADDR; only one may listen.
        listener.listen(1)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _explain(error, host, port, name) from None
    return listener


def _explain(error: Exception, host: str, port: int, name: str) -> LLMServeError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return port_in_use(host, port, name)
    if number == errno.EACCES:
        return ServerError(
            f"port {port} for {name} is reserved for root", mend=f"use --{name}-port 0"
        )
    if isinstance(error, OverflowError):
        return UsageError(f"{port} is no port", mend=f"give --{name}-port 0 to 65535")
    return ServerError(
        f"cannot listen on {host} ({error})", mend="give an IPv4 address of this machine as --host"
    )


def port_in_use(host: str, port: int, name: str) -> PortInUseError:
    return PortInUseError(
        f"port {port} for {name} is in use on {host}", mend=f"--{name}-port 0 picks a free one"
    )
