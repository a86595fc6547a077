"""A server with Triton's gRPC protocol and scripted answers, in a separate process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from tritonclient.grpc import InferenceServerClient, model_config_pb2, service_pb2, service_pb2_grpc

from llmserve.client.messages import pack_numbers, pack_texts

MODELS = {"whole": "unary", "pieces": "stream", "steps": "sequence"}


@dataclass(frozen=True)
class Script:
    """How the models ``whole``, ``pieces`` and ``steps`` answer."""

    first: float = 0.05
    """Seconds to the first piece, or to a whole answer."""
    gap: float = 0.02
    """Seconds between pieces."""
    tokens: tuple[int, ...] = (1, 1, 1, 1)
    """How many tokens each piece contains."""
    hold: int = 0
    """Nothing is answered before this many requests have arrived."""
    fail_every: int = 0
    """Every N-th request fails; 0 for none."""
    counts: bool = True
    """Whether tokens are counted."""
    lagging: bool = False
    """Whether statistics are those of the previous call, as Triton counts a batch late."""


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self.script = script
        self.arrived = 0
        self.answered = [0]
        self.all_arrived = asyncio.Event()
        self.steps: dict[int, int] = {}

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        response = service_pb2.RepositoryIndexResponse()
        for name in MODELS:
            response.models.add(name=name, version="1", state="READY")
        return response

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name not in MODELS:
            details = f"Request for unknown model: '{request.name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, details)
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=8)
        text = model_config_pb2.TYPE_STRING
        config.input.add(name="text_input", data_type=text, dims=[1])
        outputs = {"text_output": text, "finish_reason": text}
        if self.script.counts:
            outputs |= dict.fromkeys(("num_input_tokens", "num_output_tokens"), 8)
        for name, kind in outputs.items():
            config.output.add(name=name, data_type=kind, dims=[1])
        config.parameters["llmserve.exchange"].string_value = MODELS[request.name]
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        response = service_pb2.ModelStatisticsResponse()
        stats = response.model_stats.add(name=request.name, version="1")
        count = self.answered[-1]
        if self.script.lagging:
            count = self.answered[0]
            self.answered = [self.answered[-1]]
        stats.inference_count = stats.execution_count = count
        stats.inference_stats.success.count = count
        return response

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        sequence = request.parameters["sequence_id"].int64_param
        if request.parameters["sequence_end"].bool_param:
            return self._piece(request, "", 0, None)
        tokens = self.script.tokens
        if sequence:
            at = self.steps.get(sequence, 0)
            self.steps[sequence] = at + 1
            await asyncio.sleep(self.script.gap if at else self.script.first)
            done = at == len(tokens) - 1
            return self._piece(request, "x ", sum(tokens[: at + 1]), "stop" if done else "")
        if await self._fails():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "scripted to fail")
        self.answered.append(self.answered[-1] + 1)
        return self._piece(request, "x", sum(tokens), "stop")

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if await self._fails():
                yield service_pb2.ModelStreamInferResponse(error_message="scripted to fail")
                continue
            for at in range(len(self.script.tokens)):
                if at:
                    await asyncio.sleep(self.script.gap)
                last = at == len(self.script.tokens) - 1
                count = sum(self.script.tokens[: at + 1])
                piece = self._piece(request, "x ", count, "stop" if last else "")
                piece.parameters["triton_final_response"].bool_param = last
                yield service_pb2.ModelStreamInferResponse(infer_response=piece)
            self.answered.append(self.answered[-1] + 1)

    async def _fails(self) -> bool:
        self.arrived += 1
        number = self.arrived
        if number >= self.script.hold:
            self.all_arrived.set()
        await self.all_arrived.wait()
        await asyncio.sleep(self.script.first)
        every = self.script.fail_every
        return bool(every) and number % every == 0

    def _piece(self, request: Any, text: str, count: int, reason: str | None) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        tensors = {"text_output": ("BYTES", pack_texts([text]))}
        if reason is not None:
            tensors["finish_reason"] = ("BYTES", pack_texts([reason]))
        if self.script.counts:
            tensors["num_input_tokens"] = ("INT32", pack_numbers("INT32", [5]))
            tensors["num_output_tokens"] = ("INT32", pack_numbers("INT32", [count]))
        for name, (kind, raw) in tensors.items():
            response.outputs.add(name=name, datatype=kind, shape=[1, 1])
            response.raw_output_contents.append(raw)
        return response


async def _serve(script: Script) -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Scripted(script), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


class Running:
    """A scripted server in a separate process."""

    def __init__(self, script: Script) -> None:
        command = [sys.executable, __file__, json.dumps(asdict(script))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def answered(self) -> int:
        with InferenceServerClient(self.url) as client:
            stats = client.get_inference_statistics("whole").model_stats[0].inference_stats
        return int(stats.success.count)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def scripted(**script: Any) -> Iterator[Running]:
    running = Running(Script(**script))
    try:
        yield running
    finally:
        running.kill()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    asyncio.run(_serve(Script(**{**options, "tokens": tuple(options["tokens"])})))
