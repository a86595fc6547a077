"""Hosts whose images a gateway opens for its users, and which addresses they may have.

This module imports little, because ``serve`` reads the hosts before it starts anything.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmserve.errors import UsageError

MAX_ADDRESS = 4096
"""How long an address may be: those that are signed have hundreds of characters."""
_PORTS = {"https": 443, "http": 80}

# Nothing that a library might read as a user, another host or another line is let through.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<name>[a-z0-9.-]{1,253})(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:[/?][!-~]*)?)",
    re.ASCII | re.IGNORECASE,
)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
# What ends so is an IPv4 address in one of its spellings: 127.1, 2130706433, 0x7f000001.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)

# Those that `is_global` of some Python versions lets through, or that clouds use for themselves.
_CLOSED = [
    ipaddress.ip_network(each)
    for each in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        # Azure's server for the machines themselves.
        "168.63.129.16/32",
        # Protocols' own, Teredo, 6to4 and documentation: an IPv4 address may be within.
        "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
]  # fmt: skip
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""In which networks of IPv6 alone reach the addresses of IPv4, its last four bytes."""


@dataclass(frozen=True)
class ImageHost:
    """A host of images: its name, its port, and whether it is asked over TLS."""

    scheme: str
    name: str
    port: int

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.name}{port}"


def read_hosts(values: Iterable[str]) -> frozenset[ImageHost]:
    """Read what an operator names: a name, which means https, or an address without a path."""
    hosts = set()
    for value in values:
        found = read_address(value if "://" in value else f"https://{value}")
        if found is None or found[1] != "/" or value.endswith(("/", "?", "#")):
            raise UsageError(
                f"--allow-image-host {value[:200]!r} is no host of images",
                hint="give a full name, such as images.example.com or http://images.example.com:8000"
                " (no IP address; xn--… for other letters)",
            )
        hosts.add(found[0])
    return frozenset(hosts)


def read_address(url: str) -> tuple[ImageHost, str] | None:
    """Return the host and the path of an address, None if it is not one of a named host."""
    match = None if len(url) > MAX_ADDRESS else _ADDRESS.fullmatch(url.partition("#")[0])
    if match is None:
        return None
    scheme, name = match["scheme"].lower(), match["name"].lower()
    labels, port = name.split("."), int(match["port"] or _PORTS[scheme])
    is_name = len(labels) > 1 and all(map(_LABEL.fullmatch, labels))
    if not is_name or _NUMBER.fullmatch(labels[-1]) or not 0 < port < 1 << 16:
        return None
    path = match["path"]
    return ImageHost(scheme, name, port), path if path.startswith("/") else f"/{path}"


def is_address(url: str) -> bool:
    """Return whether a text asks for something to be opened at a host, whichever that is."""
    return url[:8].lower().startswith(("http://", "https://")) and len(url) <= MAX_ADDRESS


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet, and none of a network of its own."""
    try:
        # One with a zone is of a link.
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(ip.packed[-4:])))
        if ip not in _PUBLIC_V6 or getattr(ip, "scope_id", None):
            return False
    return ip.is_global and not any(ip in network for network in _CLOSED)
