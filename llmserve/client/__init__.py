"""The client: it reads a model's config and picks the exchange that fits.

    import llmserve

    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like", max_tokens=32).text)
        for piece in client.stream("demo", "Programming in C++ is like"):
            print(piece.text, end="", flush=True)

The same verbs exist for asyncio behind :func:`connect_async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.client.aio import AsyncClient as AsyncClient
    from llmserve.client.deadlines import Timeout
    from llmserve.client.deadlines import Timeouts as Timeouts
    from llmserve.client.model import ModelInfo as ModelInfo
    from llmserve.client.model import ModelState as ModelState
    from llmserve.client.results import Completion as Completion
    from llmserve.client.results import Piece as Piece
    from llmserve.client.results import ToolCall as ToolCall
    from llmserve.client.sync import Client as Client

# Loaded when first used: gRPC and its messages take a quarter of a second to import.
_HOMES = {
    "AsyncClient": "llmserve.client.aio",
    "Client": "llmserve.client.sync",
    "Completion": "llmserve.client.results",
    "ModelInfo": "llmserve.client.model",
    "ModelState": "llmserve.client.model",
    "Piece": "llmserve.client.results",
    "Timeouts": "llmserve.client.deadlines",
    "ToolCall": "llmserve.client.results",
}

CONNECT_SECONDS = 5.0

__all__ = sorted([*_HOMES, "connect", "connect_async"])


def connect(
    url: str | None = None,
    *,
    tls: bool = False,
    root_certificates: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Timeout = None,
    connect_timeout: float = CONNECT_SECONDS,
) -> Client:
    """Give a client of the Triton at ``url``; nothing is sent before it is used.

    ``url`` is ``host:port``, ``grpc://host:port`` or ``grpcs://host:port`` (TLS), by default
    ``LLMSERVE_URL`` from the environment, else ``127.0.0.1:8001``. ``root_certificates`` is a
    PEM file that TLS trusts in place of the system's, ``headers`` go with every call, and
    ``timeout`` is in seconds, for every request that names none of its own; :class:`Timeouts` has
    one for each part of it. ``connect_timeout`` is for each attempt to connect.

    A request that may have begun is never sent again. What a server says that it has not looked
    at, since it was about to end, goes to the next connection.
    """
    from llmserve.client.sync import Client
    from llmserve.client.url import Endpoint

    endpoint = Endpoint(url, tls, root_certificates, headers, connect_timeout)
    return Client(endpoint, timeout=timeout)


def connect_async(
    url: str | None = None,
    *,
    tls: bool = False,
    root_certificates: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Timeout = None,
    connect_timeout: float = CONNECT_SECONDS,
) -> AsyncClient:
    """Do what :func:`connect` does, for asyncio."""
    from llmserve.client.aio import AsyncClient
    from llmserve.client.url import Endpoint

    endpoint = Endpoint(url, tls, root_certificates, headers, connect_timeout)
    return AsyncClient(endpoint, timeout=timeout)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'llmserve.client' has no attribute {name!r}")
    return getattr(import_module(home), name)
