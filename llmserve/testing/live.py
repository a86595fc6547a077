"""A real Triton for tests, which builds, loads and serves models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from llmserve.builder.fitted import build
from llmserve.testing.orders import Orders

if TYPE_CHECKING:
    from llmserve.client import Client
    from llmserve.server import Server

# Each model is a separate process, most of them with torch.
_MAX_LOADED = 8
# Seconds. At the end, no test waits for an answer any more.
_GRACE = 10.0
_POLL_INTERVAL = 0.1
_STATISTICS_TIMEOUT = 10.0
_LOAD_TIMEOUT = 240.0


class LiveTriton:
    """A running server that loads models on demand; created by the fixture ``triton``."""

    def __init__(self, orders: Orders, client: Client, repository: Path) -> None:
        self._orders = orders
        self.client = client
        self.repository = repository
        self._built: dict[str, tuple[str, ...]] = {}
        self._loaded: dict[str, tuple[str, ...]] = {}
        self._owners: dict[str, str] = {}
        # A fixture may load several models at once.
        self._making_room = Lock()

    @classmethod
    @contextmanager
    def start(cls, repository: Path) -> Iterator[LiveTriton]:
        """Start a server with an empty repository; it stops at the end of the block."""
        from llmserve.client import connect
        from llmserve.server import ServerSettings

        repository.mkdir(parents=True, exist_ok=True)
        settings = ServerSettings(
            repository, http_port=0, grpc_port=0, metrics_port=0, renewable=True,
            runtime="embedded", ready_timeout=_LOAD_TIMEOUT, grace=_GRACE,
        )  # fmt: skip
        with (
            Orders.start(settings) as orders,
            connect(orders.server.grpc_url, timeout=120) as client,
        ):
            yield cls(orders, client, repository)

    @property
    def server(self) -> Server:
        return self._orders.server

    def load(self, *names: str) -> None:
        """Load models of the repository, or load them again after a change.

        The old one answers until the new one is loaded. Raises :class:`llmserve.errors.ServerError`
        with the reason if one is not loaded. As with ``build``, those of tests in other folders
        make room for them.
        """
        self._make_room(len(names))
        self._orders.load(*names)

    def unload(self, *names: str) -> None:
        """Unload models, with the parts that no other model has."""
        self._orders.unload(*names)

    def build(self, plugin: str, model: str = "demo", **arguments: Any) -> str:
        """Build and load a model, and return its name; the same model is built only once.

        All arguments of ``llmserve.build`` are accepted, including options. When many models are
        loaded, those of tests in other folders are unloaded, and reloaded on the next call.
        """
        key = json.dumps([plugin, model, arguments], sort_keys=True, default=str)
        if key not in self._built:
            name = arguments.pop("name", None) or f"{plugin}-{len(self._built)}"
            result = build(plugin, model, name=name, output=self.repository, **arguments)
            self._built[key] = (*result.manifest.parts, name)
        models = self._built[key]
        self._ensure_loaded(models[-1], models)
        return models[-1]

    def _ensure_loaded(self, name: str, models: tuple[str, ...]) -> None:
        """Load a model and its parts, and unload models of other folders if there are too many."""
        if name not in self._loaded:
            self._make_room(len(models))
            self._orders.load(name)
        # The model requested last is unloaded last.
        self._loaded[name] = self._loaded.pop(name, models)
        self._owners[name] = _folder_of_test()

    def _make_room(self, more: int) -> None:
        """Unload models of tests in other folders if there are too many with so many more."""
        owner = _folder_of_test()
        with self._making_room:
            count = more + sum(map(len, self._loaded.values()))
            for other in [key for key in self._loaded if self._owners[key] != owner]:
                if count > _MAX_LOADED:
                    parts = self._loaded.pop(other)
                    count -= len(parts)
                    self._orders.unload_later(parts[-1])

    def executions(self, model: str) -> int:
        """Return how many batches Triton has run for a model, by Triton's own count."""
        return int(self._statistics(model).execution_count)

    def requests(self, model: str, *, at_least: int = 0) -> int:
        """Return how many prompts Triton has answered for a model, by Triton's own count.

        If answers have just arrived, pass their number as ``at_least``, to wait until they count.
        """
        return int(self._statistics(model, at_least).inference_count)

    def _statistics(self, model: str, at_least: int = 0) -> Any:
        """Read a model's counts once they are stable: a batch counts after its answers are sent."""
        deadline = time.monotonic() + _STATISTICS_TIMEOUT
        counts, last = self._counts(model), None
        while (counts != last or counts.inference_count < at_least) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
            counts, last = self._counts(model), counts
        return counts

    def _counts(self, model: str) -> Any:
        from tritonclient.grpc import service_pb2

        with self._stub() as stub:
            response = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=model))
        return response.model_stats[0]

    def send_bytes(self, model: str, prompt: bytes, **options: Any) -> Any:
        """Send a prompt that may be invalid text, which the client would refuse.

        Returns the server's error message, or None if there was none.
        """
        from llmserve.client.exchange import open_exchange

        exchange = open_exchange(self.client.model(model), ["x"], options, pieces=False)
        (request,) = exchange.next_round()
        request.raw_input_contents[0] = len(prompt).to_bytes(4, "little") + prompt
        with self._stub() as stub:
            # Triton accepts requests to any model in a stream.
            messages = [m.error_message for m in stub.ModelStreamInfer(iter([request]))]
        return next((message for message in messages if message), None)

    @contextmanager
    def _stub(self) -> Iterator[Any]:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        with grpc.insecure_channel(self.server.grpc_url) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def completion_order(triton: LiveTriton, model: str, *, long: int, short: int) -> list[str]:
    """Request a long answer and, once it streams, a short one; return which finishes first."""
    order: list[str] = []
    started = Event()

    def ask(name: str, tokens: int) -> None:
        options = {"max_tokens": tokens, "ignore_eos": True}
        try:
            for _ in triton.client.stream(model, "Programming in C++ is like", **options):
                started.set()
        finally:
            # One that fails is no longer waited for, and raised below.
            started.set()
        order.append(name)

    with ThreadPoolExecutor(1) as pool:
        long_answer = pool.submit(ask, "long", long)
        assert started.wait(60)
        try:
            ask("short", short)
        finally:
            # If both fail, the first is the cause.
            long_answer.result()
    return order


def _folder_of_test() -> str:
    """Return the folder of the test that runs: a fixture may use a model for all tests of it."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[0]
