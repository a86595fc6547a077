"""The client of a Triton. It reads from a model's config how to send requests to it.

    import llmserve

    with llmserve.connect() as client:
        print(client.generate("demo", "Programming in C++ is like", max_tokens=32).text)
        for piece in client.stream("demo", "Programming in C++ is like"):
            print(piece.text, end="", flush=True)

:func:`connect_async` has the same methods for asyncio.
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
    from llmserve.client.tools.calls import read_calls as read_calls
    from llmserve.client.tools.calls import stream_calls as stream_calls
    from llmserve.client.tools.formats import ToolFormats as ToolFormats
    from llmserve.client.tools.prompt import TOOLS_PLACE as TOOLS_PLACE
    from llmserve.client.tools.request import Tools as Tools
    from llmserve.client.tools.request import ToolsError as ToolsError

# Imported on first use: gRPC and its messages take a quarter of a second to import.
_MODULES = {
    "AsyncClient": "llmserve.client.aio",
    "Client": "llmserve.client.sync",
    "Completion": "llmserve.client.results",
    "ModelInfo": "llmserve.client.model",
    "ModelState": "llmserve.client.model",
    "Piece": "llmserve.client.results",
    "TOOLS_PLACE": "llmserve.client.tools.prompt",
    "Timeouts": "llmserve.client.deadlines",
    "ToolCall": "llmserve.client.results",
    "ToolFormats": "llmserve.client.tools.formats",
    "Tools": "llmserve.client.tools.request",
    "ToolsError": "llmserve.client.tools.request",
    "read_calls": "llmserve.client.tools.calls",
    "stream_calls": "llmserve.client.tools.calls",
}

CONNECT_SECONDS = 5.0

__all__ = sorted([*_MODULES, "connect", "connect_async"])


def connect(
    url: str | None = None,
    *,
    tls: bool = False,
    root_certificates: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Timeout = None,
    connect_timeout: float = CONNECT_SECONDS,
) -> Client:
    """Return a client of the Triton at ``url``; it sends nothing until it is used.

    ``url`` is ``host:port``, ``grpc://host:port`` or ``grpcs://host:port`` (TLS). The default is
    ``LLMSERVE_URL`` from the environment, else ``127.0.0.1:8001``. ``root_certificates`` is a PEM
    file that TLS trusts instead of the system's certificates. ``headers`` are sent with every call.
    ``timeout`` is the default for all requests, in seconds; :class:`Timeouts` limits each part of a
    request. ``connect_timeout`` limits each attempt to connect.

    A request that may have started is never sent again. A request that the server reports as
    unprocessed, because it was about to shut down, is sent on the next connection.
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
    places_tools: bool = True,
) -> AsyncClient:
    """Return a client for asyncio; the arguments are those of :func:`connect`.

    Without ``places_tools`` it sends conversations as they are: the caller has placed their tools
    and calls with its own :class:`ToolFormats`, and reads calls itself.
    """
    from llmserve.client.aio import AsyncClient
    from llmserve.client.url import Endpoint

    endpoint = Endpoint(url, tls, root_certificates, headers, connect_timeout)
    return AsyncClient(endpoint, timeout=timeout, places_tools=places_tools)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'llmserve.client' has no attribute {name!r}")
    return getattr(import_module(module), name)
