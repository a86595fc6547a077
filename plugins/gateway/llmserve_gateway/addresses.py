"""Which addresses others can reach. It imports little: ``serve`` asks before it starts anything."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from llmserve.errors import UsageError


def refuse_open(host: str) -> None:
    """Refuse an address that the whole network can reach, for a gateway that asks for no keys."""
    if not _is_loopback(host):
        raise UsageError(
            f"{host} can be reached by others, and no keys are asked for",
            mend="make one (llmserve key new NAME) and give --keys FILE, or say --no-auth",
        )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
