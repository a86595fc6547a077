"""Clients of the Triton at an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmserve.client.aio import AsyncClient
    from llmserve.client.deadlines import Timeout
    from llmserve.client.sync import Client

_CONNECT_SECONDS = 5.0


def connect(
    url: str | None = None,
    *,
    tls: bool = False,
    root_certificates: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Timeout = None,
    connect_timeout: float = _CONNECT_SECONDS,
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
    connect_timeout: float = _CONNECT_SECONDS,
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
