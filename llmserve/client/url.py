"""The address of a server and the settings of a connection to it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.contract.address import Address
from llmserve.errors import UsageError

DEFAULT_URL = "127.0.0.1:8001"

_OPTIONS: tuple[tuple[str, Any], ...] = (
    # The server has its own limits; a second one here would only hide them.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Detects a server that died without closing the connection. Triton closes connections that
    # are pinged more often than every five minutes.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Otherwise, a new client of an address that another one has tried in vain waits as long as
    # that before it tries: the longer the server was away, the longer after it has come back.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# A proxy from the environment cannot reach this machine's loopback address.
_DIRECT = (*_OPTIONS, ("grpc.enable_http_proxy", 0))

_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?/?"
)


@dataclass(frozen=True)
class HostAndPort:
    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def triton(self, *, http: str = "", metrics: str = "") -> Address:
        """Where a Triton listens whose gRPC is here.

        Unless it is said, its ports follow one another: HTTP, gRPC, metrics.
        """
        http = http.rstrip("/") or f"http://{self.host}:{self.port - 1}"
        metrics = metrics or f"http://{self.host}:{self.port + 1}/metrics"
        return Address(str(self), http, metrics)


def parse_url(url: str | None = None, *, tls: bool = False) -> HostAndPort:
    """Parse a URL; the default is ``LLMSERVE_URL``, else ``127.0.0.1:8001``."""
    text = (url or os.environ.get("LLMSERVE_URL") or DEFAULT_URL).strip()
    match = _URL.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a server URL", hint="use host:port, e.g. 127.0.0.1:8001")
    scheme = (match["scheme"] or "grpc").lower()
    host = match["host"]
    if scheme in ("http", "https"):
        raise UsageError(
            f"{text} is an HTTP address",
            hint=f"use Triton's gRPC port instead (usually 8001), as in {host}:8001",
        )
    if scheme not in ("grpc", "grpcs"):
        raise UsageError(f"{text!r} has an unknown scheme", hint="use grpc:// or grpcs://")
    if match["port"] is None:
        raise UsageError(
            f"{text!r} has no port",
            hint=f"add Triton's gRPC port (usually 8001), as in {host}:8001",
        )
    port = int(match["port"])
    if not 0 < port < 65536:
        raise UsageError(f"{port} is not a port", hint="Triton's gRPC port is usually 8001")
    return HostAndPort(host, port, tls or scheme == "grpcs")


class Endpoint:
    """The address, headers and certificates that a client connects with."""

    def __init__(
        self,
        url: str | None,
        tls: bool,
        root_certificates: str | None,
        headers: Mapping[str, str] | None,
        connect_timeout: float,
    ) -> None:
        self.address = parse_url(url, tls=tls or root_certificates is not None)
        self.metadata = tuple((key.lower(), value) for key, value in (headers or {}).items())
        self._connect_timeout = connect_timeout
        self._certificates: bytes | None = None
        if root_certificates is not None:
            try:
                self._certificates = Path(root_certificates).read_bytes()
            except OSError as error:
                raise UsageError(
                    f"cannot read {root_certificates}: {error.strerror}",
                    hint="root_certificates must be a PEM file",
                ) from None

    def open(self, api: Any) -> Any:
        """Open a channel with ``api``, which is ``grpc`` or ``grpc.aio``."""
        options = _DIRECT if self.address.host in _LOOPBACK else _OPTIONS
        # Despite its name, this also limits each attempt to connect.
        options += (("grpc.min_reconnect_backoff_ms", int(self._connect_timeout * 1000)),)
        if not self.address.tls:
            return api.insecure_channel(str(self.address), options=options)
        import grpc

        credentials = grpc.ssl_channel_credentials(root_certificates=self._certificates)
        return api.secure_channel(str(self.address), credentials, options=options)
