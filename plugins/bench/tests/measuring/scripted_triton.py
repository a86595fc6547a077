"""A server that speaks Triton's gRPC and answers exactly when a script says.

It runs in a process of its own, so that a load generator and it do not share an interpreter, and
notes by the same monotonic clock when each request came and when each piece went.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from llmserve.client.messages import pack_numbers, pack_texts


@dataclass(frozen=True)
class Script:
    """How the models ``whole``, ``pieces`` and ``steps`` answer."""

    first: float = 0.2
    """Seconds to the first piece, or to a whole answer."""
    gap: float = 0.1
    """Seconds between pieces."""
    tokens: tuple[int, ...] = (1, 1, 1, 1)
    """How many tokens each piece brings."""
    stall_at: float = -1.0
    """Seconds after the first request at which nothing is answered for a while."""
    stall: float = 0.0
    fail_every: int = 0
    """Every so many requests fail."""
    counts: bool = True
    """Whether tokens are counted."""
    counted_after: float = 0.0
    """Seconds after which an answer is in the statistics, as Triton's batches are later."""


@dataclass
class Noted:
    """What the server saw of one request, by the monotonic clock."""

    came: float
    went: list[float] = field(default_factory=list)


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self.script = script
        self.noted: list[Noted] = []
        self.steps: dict[int, int] = {}

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="scripted", version="0")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        answer = service_pb2.RepositoryIndexResponse()
        for name in ("whole", "pieces", "steps"):
            answer.models.add(name=name, version="1", state="READY")
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name not in ("whole", "pieces", "steps"):
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
        exchange = {"whole": "unary", "pieces": "stream", "steps": "sequence"}[request.name]
        config.parameters["llmserve.exchange"].string_value = exchange
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelStatisticsResponse()
        stats = answer.model_stats.add(name=request.name, version="1")
        before = time.monotonic() - self.script.counted_after
        count = sum(bool(noted.went) and noted.went[-1] <= before for noted in self.noted)
        stats.inference_count = stats.execution_count = count
        stats.inference_stats.success.count = count
        return answer

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        noted = self._note()
        sequence = request.parameters["sequence_id"].int64_param
        if request.parameters["sequence_end"].bool_param:
            return self._piece(request, "", 0, None)
        if sequence:
            at = self.steps.get(sequence, 0)
            self.steps[sequence] = at + 1
            await self._wait(noted, self.script.first if at == 0 else self.script.gap)
            tokens = self.script.tokens
            done = at == len(tokens) - 1
            noted.went.append(time.monotonic())
            return self._piece(request, "x ", sum(tokens[: at + 1]), "stop" if done else "")
        await self._wait(noted, self.script.first)
        if self._fails():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "scripted to fail")
        noted.went.append(time.monotonic())
        return self._piece(request, "x", sum(self.script.tokens), "stop")

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            noted = self._note()
            if self._fails():
                yield service_pb2.ModelStreamInferResponse(error_message="scripted to fail")
                continue
            due = noted.came + self.script.first
            for at in range(len(self.script.tokens)):
                # Against a fixed time table, so that small delays do not add up.
                await self._wait(noted, due + at * self.script.gap - time.monotonic())
                noted.went.append(time.monotonic())
                last = at == len(self.script.tokens) - 1
                count = sum(self.script.tokens[: at + 1])
                answer = self._piece(request, "x ", count, "stop" if last else "")
                answer.parameters["triton_final_response"].bool_param = last
                yield service_pb2.ModelStreamInferResponse(infer_response=answer)

    def _note(self) -> Noted:
        self.noted.append(Noted(time.monotonic()))
        return self.noted[-1]

    def _fails(self) -> bool:
        every = self.script.fail_every
        return bool(every) and len(self.noted) % every == 0

    async def _wait(self, noted: Noted, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
        began = self.noted[0].came + self.script.stall_at
        if self.script.stall_at >= 0 and began <= time.monotonic() < began + self.script.stall:
            await asyncio.sleep(began + self.script.stall - time.monotonic())

    def _piece(self, request: Any, text: str, count: int, reason: str | None) -> Any:
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        tensors = {"text_output": ("BYTES", pack_texts([text]))}
        if reason is not None:
            tensors["finish_reason"] = ("BYTES", pack_texts([reason]))
        if self.script.counts:
            tensors["num_input_tokens"] = ("INT32", pack_numbers("INT32", [5]))
            tensors["num_output_tokens"] = ("INT32", pack_numbers("INT32", [count]))
        for name, (kind, raw) in tensors.items():
            answer.outputs.add(name=name, datatype=kind, shape=[1, 1])
            answer.raw_output_contents.append(raw)
        return answer


async def _serve(script: Script, port: int) -> None:
    server = grpc.aio.server()
    scripted = Scripted(script)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(port, flush=True)
    # Whoever started us closes our input when done, and then wants to know what we saw.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)
    print(json.dumps([asdict(noted) for noted in scripted.noted]), flush=True)


class Running:
    """A scripted server in a process of its own."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(script)), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def stop(self) -> list[Noted]:
        """End it and say what it saw, requests of the warm-up included."""
        out, _ = self.process.communicate(timeout=30)
        return [Noted(**noted) for noted in json.loads(out)]


@contextmanager
def scripted(**script: Any) -> Iterator[Running]:
    running = Running(Script(**script))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    script = Script(**{**given, "tokens": tuple(given["tokens"])})
    asyncio.run(_serve(script, int(sys.argv[2])))
