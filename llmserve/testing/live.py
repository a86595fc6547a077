"""A real Triton for tests: build into its repository and ask."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.builder.build import build
from llmserve.errors import ServerError
from llmserve.repository import config as modelconfig

if TYPE_CHECKING:
    from llmserve.client import Client
    from llmserve.server import Server

# Each is a process of its own, most of them with torch in it.
_MOST_LOADED = 16
# Seconds. Of what tests have left at the end, nobody waits for an answer any more.
_GRACE = 10.0
_STILL = 0.1
_PATIENCE = 10.0
_LEAVING = 3.0


class LiveTriton:
    """A running server whose models come and go; made by the fixture ``triton``."""

    def __init__(self, server: Server, client: Client, repository: Path) -> None:
        self.server = server
        self.client = client
        self.repository = repository
        self._built: dict[str, tuple[str, ...]] = {}
        self._loaded: dict[str, tuple[str, ...]] = {}
        self._owners: dict[str, str] = {}

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
        server = start(settings)
        try:
            with connect(server.grpc_url, timeout=120) as client:
                yield cls(server, client, repository)
        finally:
            server.stop(grace=_GRACE)

    def build(self, plugin: str, model: str = "demo", **asked: Any) -> str:
        """Build and load a model, and return its name; the same twice is built once.

        What ``llmserve.build`` takes can be asked for, options included. When there are many,
        what tests of other folders have asked for is unloaded; it comes back when it is asked for
        again.
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
        """Have a model and its parts loaded, and no more of other folders' than fit beside them."""
        # A fixture may hold a name for all tests of its folder.
        owner = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[0]
        if name not in self._loaded:
            count, gone = len(models) + sum(map(len, self._loaded.values())), []
            for other in [one for one in self._loaded if self._owners[one] != owner]:
                if count > _MOST_LOADED:
                    gone.append(self._loaded.pop(other))
                    count -= len(gone[-1])
            self._exchange(gone, models)
        # Asked for last, it goes last.
        self._loaded[name] = self._loaded.pop(name, models)
        self._owners[name] = owner

    def _exchange(self, gone: Sequence[tuple[str, ...]], models: tuple[str, ...]) -> None:
        """Unload and load at the same time: each is a process that takes seconds for itself."""
        steps = {
            step.model_name
            for model in models
            for step in modelconfig.read(self.repository / model).ensemble_scheduling.step
        }
        # An ensemble's steps come with it. Had they been loaded before, they would be once more.
        wanted = [model for model in models if model not in steps]
        with ThreadPoolExecutor(len(wanted) + len(gone)) as pool:
            jobs = [pool.submit(self.server.load, model) for model in wanted]
            # The ensemble first: Triton keeps what an ensemble needs.
            jobs += [pool.submit(self._unload, *reversed(parts)) for parts in gone]
            for job in jobs:
                job.result()

    def _unload(self, *models: str) -> None:
        # Triton 2.51 may count a request that was cancelled in its queue as running for ever, and
        # then never lets go of the model. That is no fault of the test that asks for another.
        for model in models:
            with suppress(ServerError):
                self.server.unload(model, timeout=_LEAVING)

    def executions(self, model: str) -> int:
        """Return how many batches Triton has run for a model, by its own count."""
        return int(self._statistics(model).execution_count)

    def requests(self, model: str, *, at_least: int = 0) -> int:
        """Return how many prompts Triton has answered for a model, by its own count.

        Name how many there are ``at_least`` where answers have just come.
        """
        return int(self._statistics(model, at_least).inference_count)

    def _statistics(self, model: str, at_least: int = 0) -> Any:
        """Read a model's counts once they stand still: a batch counts after its answers left."""
        deadline = time.monotonic() + _PATIENCE
        found, before = self._counts(model), None
        while (found != before or found.inference_count < at_least) and time.monotonic() < deadline:
            time.sleep(_STILL)
            found, before = self._counts(model), found
        return found

    def _counts(self, model: str) -> Any:
        from tritonclient.grpc import service_pb2

        with self._stub() as stub:
            answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model))
        return answer.model_stats[0]

    def send_bytes(self, model: str, prompt: bytes, **options: Any) -> Any:
        """Send a prompt that need not be text, past the client, which would refuse it.

        Returns the server's error message, or None if there was none.
        """
        from llmserve.client.exchange import open_exchange

        exchange = open_exchange(self.client.model(model), ["x"], options, pieces=False)
        (request,) = exchange.next_round()
        request.raw_input_contents[0] = len(prompt).to_bytes(4, "little") + prompt
        with self._stub() as stub:
            # Triton takes requests to any model in a stream.
            messages = [m.error_message for m in stub.ModelStreamInfer(iter([request]))]
        return next((message for message in messages if message), None)

    @contextmanager
    def _stub(self) -> Iterator[Any]:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        with grpc.insecure_channel(self.server.grpc_url) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
