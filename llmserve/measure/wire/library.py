"""gRPC's own asyncio."""

from __future__ import annotations

import time
from typing import Any

import grpc
import grpc.aio

from llmserve.client.channel import Endpoint
from llmserve.measure.wire.call import Arrivals, Broken, Cancel, Ended, begin

_END: Any = vars(grpc.aio)["EOF"]


class LibraryWire:
    """Works with every server, and costs what the library costs."""

    name = "grpc"

    def __init__(self, endpoint: Endpoint) -> None:
        self._metadata = endpoint.metadata
        self._channel = endpoint.open(grpc.aio)
        self._methods: dict[str, Any] = {}

    async def call(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals
    ) -> None:
        """Send a request and take what comes.

        A stream of one request is the same on the wire whichever way it is called, and so is a
        single answer: this one needs no task to feed it, and ``read`` costs less than iterating.
        """
        if path not in self._methods:
            self._methods[path] = self._channel.unary_stream(path)
        try:
            call = self._methods[path](request, timeout=timeout, metadata=self._metadata)
            while (message := await call.read()) is not _END:
                arrivals.append((time.monotonic(), message))
        except grpc.aio.AioRpcError as error:
            raise Broken(error.code().name, error.details() or "") from None

    def begin(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals, ended: Ended
    ) -> Cancel:
        """Do the same in a task of its own."""
        return begin(self.call(path, request, timeout, arrivals), ended)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._channel.close()
