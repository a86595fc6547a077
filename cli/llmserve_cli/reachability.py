"""Who can reach what `llmserve serve` listens on: others only the frontends, unless asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from contextlib import suppress

from llmserve.contract.container import LOOPBACK
from llmserve.errors import UsageError
from llmserve.plugin import is_loopback


def host_of_triton(host: str, *, open_triton: bool) -> str:
    """Return where Triton listens: its own ports know no keys, so others get them in words only."""
    if open_triton and is_loopback(host):
        raise UsageError(
            f"--open-triton is for an address that others reach, and {host} is none",
            hint="give it with --host, or leave --open-triton out",
        )
    return host if open_triton or is_loopback(host) else LOOPBACK


def refuse_unused(host: str, listening: Collection[str]) -> None:
    """Refuse an address on which nothing would listen, neither Triton nor a frontend."""
    if host not in listening and not is_loopback(host):
        raise UsageError(
            f"nothing would listen on {host}: no frontend does, and Triton's own ports stay "
            f"on {LOOPBACK}",
            hint="--open-triton opens them there, without keys",
        )


def reach(host: str, *, keys: bool) -> str:
    """Say who reaches what listens on an address, if others than this machine's programs do."""
    if is_loopback(host):
        return ""
    who = "open to others"
    with suppress(ValueError):
        who = "on all addresses" if ipaddress.ip_address(host).is_unspecified else who
    return f"  {who}, {'with' if keys else 'without'} keys"
