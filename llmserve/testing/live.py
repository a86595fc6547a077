"""A real Triton for tests: build into its repository and ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder import build

if TYPE_CHECKING:
    from llmserve.client import Client
    from llmserve.server import Server

# Each is a process of its own, most of them with torch in it.
_MOST_LOADED = 40


class LiveTriton:
    """A running server whose models come and go; made by the fixture ``triton``."""

    def __init__(self, server: Server, client: Client, repository: Path) -> None:
        self.server = server
        self.client = client
        self.repository = repository
        self._built: dict[str, tuple[str, ...]] = {}
        self._loaded: dict[str, tuple[str, ...]] = {}

    @classmethod
    @contextmanager
    def start(cls, repository: Path) -> Iterator[LiveTriton]:
        """Start a server on an empty repository; it is gone when the block is left."""
        from llmserve.client import connect
        from llmserve.server import ServerSettings, start

        repository.mkdir(parents=True, exist_ok=True)
        settings = ServerSettings(
            repository, http_port=0, grpc_port=0, metrics_port=0, explicit=True, runtime="embedded"
        )
        with start(settings) as server, connect(server.grpc_url, timeout=120) as client:
            yield cls(server, client, repository)

    def build(self, plugin: str, model: str = "demo", **asked: Any) -> str:
        """Build and load a model, and return its name; the same twice is built once.

        What ``llmserve.build`` takes can be asked for, options included. What was asked for
        longest ago is unloaded when there are many, and comes back when it is asked for again.
        """
        key = json.dumps([plugin, model, asked], sort_keys=True, default=str)
        if key not in self._built:
            name = asked.pop("name", None) or f"{plugin}-{len(self._built)}"
            result = build(plugin, model, name=name, output=self.repository, **asked)
            self._built[key] = (*result.manifest.parts, name)
        models = self._built[key]
        self._keep(models[-1], models)
        return models[-1]

    def _keep(self, name: str, models: tuple[str, ...]) -> None:
        """Have a model and its parts loaded, and no more others than fit beside them."""
        if name not in self._loaded:
            others = [len(parts) for parts in self._loaded.values()]
            while others and sum(others) + len(models) > _MOST_LOADED:
                oldest = next(iter(self._loaded))
                # The ensemble first: Triton keeps what an ensemble needs.
                for model in reversed(self._loaded.pop(oldest)):
                    self.server.unload(model)
                others.pop(0)
            for model in models:
                self.server.load(model)
        # Asked for last, it goes last.
        self._loaded[name] = self._loaded.pop(name, models)

    def executions(self, model: str) -> int:
        """Return how many batches Triton has run for a model, by its own count."""
        return int(self._statistics(model).execution_count)

    def requests(self, model: str) -> int:
        """Return how many prompts Triton has answered for a model, by its own count."""
        return int(self._statistics(model).inference_count)

    def _statistics(self, model: str) -> Any:
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        with grpc.insecure_channel(self.server.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model))
        return answer.model_stats[0]

    def send_bytes(self, model: str, prompt: bytes, **options: Any) -> Any:
        """Send a prompt that need not be text, past the client, which would refuse it.

        Returns the server's error message, or None if there was none.
        """
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        from llmserve.client.exchange import open_exchange

        exchange = open_exchange(self.client.model(model), ["x"], options, pieces=False)
        (request,) = exchange.next_round()
        request.raw_input_contents[0] = len(prompt).to_bytes(4, "little") + prompt
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                if exchange.info.exchange != "stream":
                    stub.ModelInfer(request)
                    return None
                messages = [m.error_message for m in stub.ModelStreamInfer(iter([request]))]
            except grpc.RpcError as error:
                return error.details()
        return next((message for message in messages if message), None)
