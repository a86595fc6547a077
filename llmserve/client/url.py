"""Where the server is: the forms that a URL can take."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from llmserve.errors import UsageError

DEFAULT_URL = "127.0.0.1:8001"

_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)"
    r"(?::(?P<port>[0-9]{1,5}))?/?"
)


@dataclass(frozen=True)
class Address:
    """A host and a port for gRPC, and whether to speak TLS to it."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_url(url: str | None = None, *, tls: bool = False) -> Address:
    """Read a URL; without one ``LLMSERVE_URL`` counts, else ``127.0.0.1:8001``.

    >>> parse_url("grpcs://triton.example:8001")
    Address(host='triton.example', port=8001, tls=True)
    >>> str(parse_url("[::1]:9000"))
    '[::1]:9000'
    """
    text = (url or os.environ.get("LLMSERVE_URL") or DEFAULT_URL).strip()
    match = _URL.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no server URL", mend="write host:port, as in 127.0.0.1:8001")
    scheme = (match["scheme"] or "grpc").lower()
    host = match["host"]
    if scheme in ("http", "https"):
        raise UsageError(
            f"{text} is an HTTP address",
            mend=f"name Triton's gRPC port instead (usually 8001), as in {host}:8001",
        )
    if scheme not in ("grpc", "grpcs"):
        raise UsageError(f"{text!r} has a scheme that is not known", mend="use grpc:// or grpcs://")
    if match["port"] is None:
        raise UsageError(
            f"{text!r} names no port",
            mend=f"name Triton's gRPC port (usually 8001), as in {host}:8001",
        )
    port = int(match["port"])
    if not 0 < port < 65536:
        raise UsageError(f"{port} is no port", mend="Triton's gRPC port is usually 8001")
    return Address(host, port, tls or scheme == "grpcs")
