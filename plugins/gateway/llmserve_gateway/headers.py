"""Checks of a request's headers, before anything else reads them.

A gateway without keys answers whoever reaches it, and a browser on the same machine reaches it for
any page. Such a page betrays itself by the host that it asks for, or by its origin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from llmserve.plugin import is_loopback
from llmserve_gateway.errors import ApiError

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

ANY = "*"
_ONCE = (b"authorization", b"x-api-key", b"host", b"origin", b"content-encoding")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON = (b"content-type", b"application/json")


def is_anthropics(headers: Mapping[str, str]) -> bool:
    """Return whether a request is of a client of Anthropic's API, which has paths of OpenAI's."""
    return "anthropic-version" in headers


class HeaderChecks:
    """An ASGI application that refuses some requests, and passes the others on.

    ``hosts`` are the names that the gateway has besides those of loopback, or None if it may have
    any. ``origins`` are those of pages that may use the gateway, or None if a key decides that.
    """

    def __init__(
        self, app: AsgiApp, hosts: Sequence[str] | None, origins: Sequence[str] | None
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or ANY in hosts else {_name(host) for host in hosts}
        self._origins = None if origins is None or ANY in origins else frozenset(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                body = error.json()
                headers = [_JSON, (b"content-length", str(len(body)).encode())]
                await send(
                    {"type": "http.response.start", "status": error.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Mapping[str, Any]) -> None:
        names = [name for name, _ in scope["headers"]]
        for name in _ONCE:
            if names.count(name) > 1:
                raise ApiError(400, f"the header {name.decode()} was sent more than once")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host")
        if self._hosts is not None and host is not None and not self._is_ours(host):
            what = f"this gateway has no host {host[:200]!r}: start it with --allowed-host"
            raise ApiError(403, what, code="host_not_allowed")
        if self._origins is not None and scope["method"] not in _SAFE:
            self._check_origin(headers, host)

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        is_local = is_loopback(name) or name.endswith(".localhost")
        return is_local or name in (self._hosts or ())

    def _check_origin(self, headers: Mapping[bytes, str], host: str | None) -> None:
        """Refuse what a page of another origin sends; a program sends no origin."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        # Browsers say this of an address that is encrypted or local, and no page can change it.
        if site == "same-origin" or (site is None and origin is None):
            return
        if origin in (self._origins or ()):
            return
        if site is None and origin is not None and _netloc(origin) == host:
            return
        what = f"pages of {(origin or 'another origin')[:200]!r} may not use this gateway: "
        raise ApiError(403, what + "start it with --cors-origin", code="origin_not_allowed")


def _netloc(origin: str) -> str | None:
    """Return the host and port of an origin, None if it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """Return a host's name without its port.

    >>> _name("[::1]:8080"), _name("LOCALHOST.:80"), _name("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
