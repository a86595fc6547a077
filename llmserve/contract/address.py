"""Where a Triton listens."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """The interfaces of one Triton; what is not known is empty.

    ``grpc`` has no scheme, as gRPC expects; ``http`` and ``metrics`` are URLs.
    """

    grpc: str
    http: str = ""
    metrics: str = ""


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach what listens on an address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
