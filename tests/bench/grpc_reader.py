"""What `grpc.aio` alone takes to read streams: what a gateway on it can come down to.

    python -m tests.bench.grpc_reader URL MODEL

It asks as the gateway's benchmark does, 32 at a time, throws away what comes, and says how much
processor time of its own a message took, in milliseconds.
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

AT_A_TIME, EACH, TOKENS = 32, 3, 64


async def read(url: str, model: str) -> float:
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        told = await stub.ModelConfig(service_pb2.ModelConfigRequest(name=model))
        info = read_config(told.config)
        options = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}

        async def one(number: int) -> int:
            prompt = f"{number} Programming in C++ is like"
            request = build_request(info, [prompt], options, request_id="1")
            messages = 0
            async for message in stub.ModelStreamInfer(iter([request])):
                if message.error_message:
                    raise RuntimeError(message.error_message)
                messages += 1
            return messages

        async def some(worker: int) -> int:
            return sum([await one(worker * EACH + turn) for turn in range(EACH)])

        await one(0)
        begun = time.process_time()
        count = sum(await asyncio.gather(*map(some, range(AT_A_TIME))))
        return (time.process_time() - begun) / count * 1000


if __name__ == "__main__":
    print(uvloop.run(read(*sys.argv[1:3])))
