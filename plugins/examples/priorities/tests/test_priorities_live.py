"""Which requests run first and which are refused, on a real Triton through our client."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any

import pytest
from click.testing import CliRunner

from llmserve.errors import RequestRejectedError, RequestTimeoutError
from llmserve.testing import LiveTriton
from llmserve_cli.group import cli

PROMPT = "Once upon a time"
LONG = 400
TRIES = 10


class Sender:
    """Sends requests to one model, one after another, and records the order of the answers."""

    def __init__(self, triton: LiveTriton, model: str, pool: ThreadPoolExecutor) -> None:
        self._triton, self._pool = triton, pool
        self.model = model
        self.order: list[str] = []

    def start_long_request(self) -> Future[None]:
        """Send a request that takes long, and wait until it runs."""
        started = Event()
        running = self.send("running", started.set, tokens=LONG, priority=1)
        assert started.wait(60)
        return running

    def queue_behind_long_request(
        self, send: Callable[[], Sequence[Future[None]]]
    ) -> list[Future[None]]:
        """Send requests while one runs; on a busy machine, it may end before they arrive."""
        for _ in range(TRIES):
            self.order.clear()
            running, queued = self.start_long_request(), send()
            if not running.done():
                return [running, *queued]
            wait(queued)
        raise AssertionError("no request ran for long enough")

    def send(
        self, name: str, on_piece: Callable[[], object] = bool, *, tokens: int = 64, **extra: Any
    ) -> Future[None]:
        """Send a request and wait until it is in Triton's queue, runs or has ended."""
        params = {"max_tokens": tokens, "ignore_eos": True, **extra}
        runs, waiting = Event(), self._waiting()

        def stream() -> None:
            for _ in self._triton.client.stream(self.model, PROMPT, **params):
                runs.set()
                on_piece()
            # Requests run one by one and take a while, so this is the order in which they ran.
            self.order.append(name)

        future = self._pool.submit(stream)
        deadline = time.monotonic() + 20
        while not (runs.is_set() or future.done() or self._waiting() > waiting):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return future

    def _waiting(self) -> int:
        """Return how many requests wait in the model's queues, by Triton's own count."""
        with urllib.request.urlopen(self._triton.server.metrics_url, timeout=10) as page:
            text = page.read().decode()
        counts = re.findall(
            rf'^nv_inference_pending_request_count{{model="{self.model}".*}} (\d+)', text, re.M
        )
        return int(counts[0]) if counts else 0


@pytest.fixture
def sender(triton: LiveTriton) -> Iterator[Sender]:
    """Sends to a model that runs single requests; priority 3 queues two, 4 has a short time-out."""
    model = triton.build(
        "hf",
        batching="priorities",
        max_batch_size=1,
        priority_levels=4,
        queues="3:size=2;4:timeout_ms=20",
    )
    triton.client.generate(model, PROMPT, max_tokens=1)
    with ThreadPoolExecutor(8) as pool:
        yield Sender(triton, model, pool)


def test_a_high_priority_overtakes_waiting_requests(sender: Sender) -> None:
    jobs = sender.queue_behind_long_request(
        lambda: [
            *(sender.send(f"low {n}", priority=3) for n in (1, 2)),
            sender.send("high", priority=1),
        ]
    )
    for job in jobs:
        job.result()
    assert sender.order == ["running", "high", "low 1", "low 2"]


def test_a_full_queue_refuses_a_request_and_runs_the_others(sender: Sender) -> None:
    *jobs, refused, high = sender.queue_behind_long_request(
        lambda: [
            *(sender.send(f"low {n}", priority=3) for n in (1, 2)),
            sender.send("one too many", priority=3),
            sender.send("high", priority=1),
        ]
    )
    with pytest.raises(RequestRejectedError, match=r"queue of .* is full: try again later"):
        refused.result()
    for job in (*jobs, high):
        job.result()
    assert sender.order == ["running", "high", "low 1", "low 2"]


def test_a_request_that_waits_too_long_times_out(sender: Sender) -> None:
    running, late = sender.queue_behind_long_request(lambda: [sender.send("late", priority=4)])
    with pytest.raises(RequestTimeoutError, match="waited too long in the queue"):
        late.result()
    running.result()
    assert sender.order == ["running"]


def test_a_request_can_have_a_shorter_time_out_than_its_queue(sender: Sender) -> None:
    running, patient, late = sender.queue_behind_long_request(
        lambda: [
            sender.send("patient", priority=2, queue_timeout=60),
            sender.send("late", priority=2, queue_timeout=0.02),
        ]
    )
    with pytest.raises(RequestTimeoutError, match="waited too long in the queue"):
        late.result()
    running.result()
    patient.result()
    # The last token of one and the first of the other are so close that either may be first.
    assert sorted(sender.order) == ["patient", "running"]


def test_the_command_accepts_a_queue_time_out(triton: LiveTriton, sender: Sender) -> None:
    command = ["query", sender.model, PROMPT, "--url", triton.server.grpc_url]
    for _ in range(TRIES):
        running = sender.start_long_request()
        result = CliRunner().invoke(cli, [*command, "--queue-timeout", "0.02"])
        running.result()
        if result.exit_code:
            break
    assert isinstance(result.exception, RequestTimeoutError)
    assert "waited too long in the queue" in str(result.exception)


def test_a_priority_that_does_not_exist_is_the_default(sender: Sender) -> None:
    sender.send("beyond", priority=9).result()
    assert sender.order == ["beyond"]
