"""Which ports to listen on: checked before anything is started."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve.server.settings import ServerSettings


@dataclass(frozen=True)
class Ports:
    """Where a server listens: one address, three ports."""

    host: str
    """In digits: given a name such as ``localhost``, Triton never becomes ready."""
    http: int
    grpc: int
    metrics: int


def choose(settings: ServerSettings) -> Ports:
    """Return the ports asked for, a free one wherever 0 was; raise where one is taken."""
    asked = {
        "http": settings.http_port,
        "grpc": settings.grpc_port,
        "metrics": settings.metrics_port,
    }
    fixed = [port for port in asked.values() if port]
    if len(set(fixed)) < len(fixed):
        raise UsageError("two of the ports are the same", mend="give each its own, or 0")
    # All three are held until each is known, so that no free port is found twice.
    with ExitStack() as held:
        bound = {
            name: held.enter_context(_bind(settings.host, port, name)).getsockname()
            for name, port in sorted(asked.items(), key=lambda item: item[1] == 0)
        }
    return Ports(bound["http"][0], **{name: port for name, (_, port) in bound.items()})


def _bind(host: str, port: int, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Otherwise a connection of the last server that has just been closed counts as taken.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may be bound to one address with SO_REUSEADDR; only one may listen.
        listener.listen(1)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _explain(error, host, port, name) from error
    return listener


def _explain(error: Exception, host: str, port: int, name: str) -> ServerError | UsageError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return in_use(host, port, name)
    if number == errno.EACCES:
        return ServerError(
            f"port {port} for {name} is reserved for root", mend=f"use --{name}-port 0"
        )
    if isinstance(error, OverflowError):
        return UsageError(f"{port} is no port", mend=f"give --{name}-port 0 to 65535")
    return ServerError(
        f"cannot listen on {host} ({error})", mend="give an IPv4 address of this machine as --host"
    )


def in_use(host: str, port: int, name: str) -> PortInUseError:
    """Return the error for a port that somebody else listens on."""
    return PortInUseError(
        f"port {port} for {name} is in use on {host}", mend=f"--{name}-port 0 picks a free one"
    )
