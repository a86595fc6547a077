"""Ways for a request to travel, as tests of them use them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.client.model import read_config
from llmserve.client.wire import build_request
from llmserve.measure.wire import DirectLoop, Wire, open_wire
from tests.unit.scripted_triton import Running, scripted


def five_pieces() -> AbstractContextManager[Running]:
    """Start a server whose streams bring five pieces within a few hundredths of a second."""
    return scripted(first=0.02, gap=0.01, tokens=(1,) * 5)


def over(server: Running, work: Callable[[Wire], Coroutine[Any, Any, Any]], way: str) -> Any:
    loop = DirectLoop()

    async def main() -> Any:
        wire = await open_wire(
            Endpoint.make(server.url),
            plain=way != "grpc",
            selector=loop.direct if way == "direct" else None,
        )
        assert wire.name == ("grpc" if way == "grpc" else "plain")
        try:
            return await work(wire)
        finally:
            await wire.close()

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def ways(*found: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", found or ("direct", "plain", "grpc"))


def request(model: str, prompt: str = "hello") -> bytes:
    config = service_pb2.ModelConfigResponse().config
    config.name, config.max_batch_size = model, 8
    for tensors, name in ((config.input, "text_input"), (config.output, "text_output")):
        tensors.add(name=name, data_type=13, dims=[1])
    raw: bytes = build_request(read_config(config), [prompt], {}).SerializeToString()
    return raw
