"""What `grpc.aio` alone needs to read streams: the lower bound of a gateway that uses it.

    python -m plugins.tools.bench.grpc_reader URL MODEL

It sends the same requests as the gateway's benchmark, 32 concurrently, discards the responses, and
prints the processor time per message in milliseconds: the difference between long and short
streams, so that what each stream costs once is not part of it.
"""

from __future__ import annotations

import asyncio
import sys
import time

import grpc.aio
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.client.messages import build_request
from llmserve.client.model import read_config

CONCURRENCY, EACH = 32, 3
SHORT, LONG = 32, 192
"""Tokens per stream."""


async def read(url: str, model: str) -> float:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = await stub.ModelConfig(service_pb2.ModelConfigRequest(name=model))
        info = read_config(answer.config)

        async def stream(number: int, tokens: int) -> int:
            options = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
            prompt = f"{number} Programming in C++ is like"
            request = build_request(info, [prompt], options, request_id="1")
            messages = 0
            async for message in stub.ModelStreamInfer(iter([request])):
                if message.error_message:
                    raise RuntimeError(message.error_message)
                messages += 1
            return messages

        async def streams(worker: int, tokens: int) -> int:
            return sum([await stream(worker * EACH + turn, tokens) for turn in range(EACH)])

        async def cost(tokens: int) -> tuple[float, int]:
            started = time.process_time()
            counts = await asyncio.gather(*(streams(at, tokens) for at in range(CONCURRENCY)))
            return time.process_time() - started, sum(counts)

        await stream(0, SHORT)
        (short, fewer), (long, more) = await cost(SHORT), await cost(LONG)
        return (long - short) / (more - fewer) * 1000


if __name__ == "__main__":
    print(uvloop.run(read(*sys.argv[1:3])))
