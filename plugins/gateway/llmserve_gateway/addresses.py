"""Checks of listening addresses and trace collectors.

This module imports little, because ``serve`` runs the checks before it starts anything.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from llmserve.errors import UsageError
from llmserve.plugin import is_loopback


def refuse_open(host: str) -> None:
    """Refuse an address that is reachable from the network, for a gateway without keys."""
    if not is_loopback(host):
        raise UsageError(
            f"{host} is reachable from other machines, and no API keys are configured",
            hint="create a key (llmserve key new NAME) and pass --keys FILE, or pass --no-auth",
        )


def check_collector(address: str) -> None:
    """Refuse an invalid collector URL, or any URL if the exporter is not installed."""
    from llmserve.server import traces_url

    traces_url(address)
    try:
        for name in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"):
            version(name)
    except PackageNotFoundError as missing:
        from llmserve.plugin import install_command

        raise UsageError(
            f"traces need {missing.name}", hint=install_command("llmserve-gateway[tracing]")
        ) from None
