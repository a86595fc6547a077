"""How requests travel while the clock runs: bytes out, bytes in, and when they came.

There are two ways. :mod:`library` is gRPC's own asyncio, which costs about 0.1 ms of processor time
for each message that comes, on a thread of its own and through two wake-ups. A load generator
that takes dozens of streams would measure itself, so :mod:`plain` reads the frames of an
unencrypted connection as they come, at a fraction of that. It is used where it understands the
server, which is asked once before; everything else, TLS included, goes through the library.

What is in the bytes is none of their business: that stays with :mod:`llmserve.client.wire`.
"""

from __future__ import annotations

from typing import Protocol

from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.measure.wire.call import Arrivals, Broken, Cancel, Ended, begin
from llmserve.measure.wire.direct import DirectLoop, DirectSelector
from llmserve.measure.wire.library import LibraryWire
from llmserve.measure.wire.plain import PlainWire

__all__ = [
    "Arrivals",
    "Broken",
    "Cancel",
    "DirectLoop",
    "DirectSelector",
    "Ended",
    "Wire",
    "begin",
    "open_wire",
    "path_of",
]

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_PROBE_SECONDS = 5.0


class Wire(Protocol):
    """A connection that calls can be made over, many at a time."""

    name: str

    async def call(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals
    ) -> None:
        """Send a request; every message goes to ``arrivals`` with the time it came.

        :class:`Broken` where it does not end well; what came until then is in ``arrivals``.
        """

    def begin(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals, ended: Ended
    ) -> Cancel:
        """Do the same without waiting for it, at a fraction of the cost: ``ended`` is told."""

    async def close(self) -> None:
        """Let go of the connection; calls that are under way are cancelled."""


def path_of(method: str) -> str:
    """Say where a method of Triton's service is, such as ``ModelInfer``."""
    return f"/{_SERVICE}/{method}"


async def open_wire(
    endpoint: Endpoint, *, plain: bool = True, selector: DirectSelector | None = None
) -> Wire:
    """Choose the way that costs less, if the server is found to understand it.

    With the ``selector`` of the loop it costs least.
    """
    if plain and not endpoint.address.tls:
        wire = PlainWire(endpoint, selector)
        arrivals: Arrivals = []
        request = service_pb2.ServerReadyRequest().SerializeToString()
        try:
            await wire.call(path_of("ServerReady"), request, _PROBE_SECONDS, arrivals)
            if arrivals and service_pb2.ServerReadyResponse.FromString(arrivals[0][1]).ready:
                return wire
        except Exception:  # noqa: S110
            # Whatever it was, the library either manages or says better what is wrong.
            pass
        await wire.close()
    return LibraryWire(endpoint)
