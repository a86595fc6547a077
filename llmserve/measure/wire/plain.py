"""gRPC over an unencrypted connection, read as it comes."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from llmserve.client.channel import Endpoint
from llmserve.measure.wire import hpack
from llmserve.measure.wire.call import Arrivals, Broken, Cancel, Ended, begin
from llmserve.measure.wire.connection import Connection
from llmserve.measure.wire.direct import DirectSelector
from llmserve.measure.wire.message import LENGTH, Call


class PlainWire:
    """Calls over one connection at a time; a new one is opened where the last has ended."""

    name = "plain"

    def __init__(self, endpoint: Endpoint, selector: DirectSelector | None = None) -> None:
        self._selector = selector
        address = endpoint.address
        self._host, self._port = address.host.strip("[]"), address.port
        self._authority = str(address)
        self._metadata = endpoint.metadata
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._blocks: dict[str, bytes] = {}

    async def call(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals
    ) -> None:
        """Send a request and take what comes."""
        if self._connection is None or self._connection.closed:
            await self._open(timeout)
        told: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

        def ended(code: str, details: str) -> None:
            if not told.done():
                told.set_result((code, details))

        cancel = self.begin(path, request, timeout, arrivals, ended)
        try:
            code, details = await told
        except asyncio.CancelledError:
            cancel()
            raise
        if code != "OK":
            raise Broken(code, details)

    def begin(
        self, path: str, request: bytes, timeout: float | None, arrivals: Arrivals, ended: Ended
    ) -> Cancel:
        """Send it on the spot; only where there is no connection yet a task has to wait for one."""
        connection = self._connection
        if connection is None or connection.closed:
            return begin(self.call(path, request, timeout, arrivals), ended)
        call = Call(arrivals, ended, LENGTH.pack(0, len(request)) + request)
        if timeout is not None:
            call.deadline = time.monotonic() + timeout
        connection.start(call, self._header(path))
        return partial(connection.cancel, call)

    async def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()

    async def _open(self, timeout: float | None) -> Connection:
        async with self._opening:
            if self._connection is not None and not self._connection.closed:
                return self._connection
            loop = asyncio.get_running_loop()
            opening = loop.create_connection(Connection, self._host, self._port)
            try:
                _, connection = await asyncio.wait_for(opening, timeout)
            except (OSError, asyncio.TimeoutError) as error:
                raise Broken("UNAVAILABLE", f"failed to connect: {error}") from None
            if self._selector is not None:
                connection.read_by(self._selector)
            self._connection = connection
            return connection

    def _header(self, path: str) -> bytes:
        if path not in self._blocks:
            self._blocks[path] = hpack.encode(
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", path),
                    (":authority", self._authority),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                    ("user-agent", "llmserve-bench"),
                    *self._metadata,
                ]
            )
        return self._blocks[path]
