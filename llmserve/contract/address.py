"""Where a Triton listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """The interfaces of one Triton; what is not known is empty.

    ``grpc`` has no scheme, as gRPC expects; ``http`` and ``metrics`` are URLs.
    """

    grpc: str
    http: str = ""
    metrics: str = ""
