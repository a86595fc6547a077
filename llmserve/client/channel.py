"""How to reach a server: what the sync and the asyncio channel have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from llmserve.client.url import Address, parse_url
from llmserve.errors import UsageError

OPTIONS: tuple[tuple[str, Any], ...] = (
    # The server has limits of its own; a second one here would only hide them.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
# A proxy set for the web cannot reach this machine's own loopback.
DIRECT = (*OPTIONS, ("grpc.enable_http_proxy", 0))
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Endpoint:
    """An address with what it takes to talk to it."""

    address: Address
    certificates: bytes | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    @classmethod
    def make(
        cls,
        url: str | None,
        *,
        tls: bool = False,
        root_certificates: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Endpoint:
        """Read what the caller of ``connect`` said."""
        address = parse_url(url, tls=tls or root_certificates is not None)
        certificates = None
        if root_certificates is not None:
            try:
                certificates = Path(root_certificates).read_bytes()
            except OSError as error:
                raise UsageError(
                    f"cannot read {root_certificates}: {error.strerror}",
                    mend="root_certificates is a PEM file",
                ) from None
        metadata = tuple((key.lower(), value) for key, value in (headers or {}).items())
        return cls(address, certificates, metadata)

    def open(self, api: Any) -> Any:
        """Make a channel with ``api``, which is ``grpc`` or ``grpc.aio``."""
        options = DIRECT if self.address.host in LOOPBACK else OPTIONS
        if not self.address.tls:
            return api.insecure_channel(str(self.address), options=options)
        credentials = grpc.ssl_channel_credentials(root_certificates=self.certificates)
        return api.secure_channel(str(self.address), credentials, options=options)
