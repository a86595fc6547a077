"""Who can reach an address, and where traces go.

It imports little: ``serve`` asks before it starts anything.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from llmserve.errors import UsageError


def refuse_open(host: str) -> None:
    """Refuse an address that the whole network can reach, for a gateway that asks for no keys."""
    if not is_loopback(host):
        raise UsageError(
            f"{host} can be reached by others, and no keys are asked for",
            mend="make one (llmserve key new NAME) and give --keys FILE, or say --no-auth",
        )


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_collector(address: str) -> None:
    """Refuse a collector of traces that is none, or that nothing installed here can send to."""
    from llmserve.server.tracing import traces_url

    traces_url(address)
    try:
        for name in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"):
            version(name)
    except PackageNotFoundError as missing:
        raise UsageError(
            f"traces need {missing.name}", mend="pip install 'llmserve-gateway[tracing]'"
        ) from None
