"""Who goes first, and who is refused, on a real Triton through our client."""

from __future__ import annotations

import time
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


class Crowd:
    """Requests to one model, sent one after another; who was answered in which order."""

    def __init__(self, triton: LiveTriton, model: str, pool: ThreadPoolExecutor) -> None:
        self._triton, self._pool = triton, pool
        self.model = model
        self.order: list[str] = []

    def begin(self) -> Future[None]:
        """Send one that takes long, and wait until it runs."""
        begun = Event()
        sent = self.send("running", begun.set, tokens=LONG, priority=1)
        assert begun.wait(60)
        return sent

    def behind_a_long_one(self, send: Callable[[], Sequence[Future[None]]]) -> list[Future[None]]:
        """Send requests while one runs; on a busy machine it may be over before they have come."""
        for _ in range(TRIES):
            self.order.clear()
            running, sent = self.begin(), send()
            if not running.done():
                return [running, *sent]
            wait(sent)
        raise AssertionError("no request ran for long enough")

    def send(
        self, name: str, began: Callable[[], object] = bool, *, tokens: int = 8, **extra: Any
    ) -> Future[None]:
        asked = {"max_tokens": tokens, "ignore_eos": True, **extra}

        def ask() -> None:
            for _ in self._triton.client.stream(self.model, PROMPT, **asked):
                began()
            self.order.append(name)

        sent = self._pool.submit(ask)
        # The order of arrival is what this is about.
        time.sleep(0.03)
        return sent


@pytest.fixture
def crowd(triton: LiveTriton) -> Iterator[Crowd]:
    """A model that runs one request at a time; at 3 two may wait, at 4 nobody waits for long."""
    model = triton.build(
        "hf",
        batching="priorities",
        max_batch_size=1,
        priority_levels=4,
        queues="3:size=2;4:timeout_ms=20",
    )
    triton.client.generate(model, PROMPT, max_tokens=1)
    with ThreadPoolExecutor(8) as pool:
        yield Crowd(triton, model, pool)


def test_a_high_priority_overtakes_those_that_wait(crowd: Crowd) -> None:
    jobs = crowd.behind_a_long_one(
        lambda: [
            *(crowd.send(f"low {n}", priority=3) for n in (1, 2)),
            crowd.send("high", priority=1),
        ]
    )
    for job in jobs:
        job.result()
    assert crowd.order == ["running", "high", "low 1", "low 2"]


def test_a_full_queue_refuses_and_the_others_go_on(crowd: Crowd) -> None:
    *jobs, refused, high = crowd.behind_a_long_one(
        lambda: [
            *(crowd.send(f"low {n}", priority=3) for n in (1, 2)),
            crowd.send("one too many", priority=3),
            crowd.send("high", priority=1),
        ]
    )
    with pytest.raises(RequestRejectedError, match=r"queue of .* is full: try again later"):
        refused.result()
    for job in (*jobs, high):
        job.result()
    assert crowd.order == ["running", "high", "low 1", "low 2"]


def test_one_that_waits_too_long_times_out(crowd: Crowd) -> None:
    running, impatient = crowd.behind_a_long_one(lambda: [crowd.send("impatient", priority=4)])
    with pytest.raises(RequestTimeoutError, match="waited too long in the queue"):
        impatient.result()
    running.result()
    assert crowd.order == ["running"]


def test_a_request_can_have_less_patience_than_its_queue(crowd: Crowd) -> None:
    running, patient, impatient = crowd.behind_a_long_one(
        lambda: [
            crowd.send("patient", priority=2, queue_timeout=60),
            crowd.send("impatient", priority=2, queue_timeout=0.02),
        ]
    )
    with pytest.raises(RequestTimeoutError, match="waited too long in the queue"):
        impatient.result()
    running.result()
    patient.result()
    # The last token of one and the first of the other come so close that either may be noted first.
    assert sorted(crowd.order) == ["patient", "running"]


def test_the_command_asks_for_it_too(triton: LiveTriton, crowd: Crowd) -> None:
    words = ["query", crowd.model, PROMPT, "--url", triton.server.grpc_url]
    for _ in range(TRIES):
        running = crowd.begin()
        done = CliRunner().invoke(cli, [*words, "--queue-timeout", "0.02"])
        running.result()
        if done.exit_code:
            break
    assert isinstance(done.exception, RequestTimeoutError)
    assert "waited too long in the queue" in str(done.exception)


def test_a_priority_that_does_not_exist_is_the_default(crowd: Crowd) -> None:
    crowd.send("beyond", priority=9).result()
    assert crowd.order == ["beyond"]
