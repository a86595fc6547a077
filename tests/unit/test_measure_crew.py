"""The processes that make a load: how work is dealt out, and when their figures are doubted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmserve.client.model import ModelInfo, Tensor
from llmserve.measure.asking import Asked
from llmserve.measure.codec import decode, encode
from llmserve.measure.crew import warning
from llmserve.measure.job import Ask, Job, Place, split
from llmserve.measure.loader import Loader
from llmserve.measure.runs import Record

TAKES, GIVES = ({n: Tensor(n, "BYTES", (1,))} for n in ("text_input", "text_output"))
MODEL = ModelInfo("demo", "unary", True, 8, TAKES, GIVES)
ASKS = tuple(Ask(at, f"prompt {at}", {"max_tokens": at}) for at in range(10))
JOB = Job(Place("127.0.0.1:8001"), MODEL, False, None, 5, None, 10, ASKS[:5], ASKS)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_shares_together_are_the_whole(processes: int) -> None:
    shares = split(JOB, processes)
    assert len(shares) == processes
    assert sum(share.concurrency or 0 for share in shares) == 5
    assert sorted(ask.index for share in shares for ask in share.asks) == list(range(10))
    assert all(share.total == 10 for share in shares)


def test_there_are_no_processes_without_work() -> None:
    assert len(split(JOB, 64)) == 5


def test_a_job_reaches_its_process_as_it_was() -> None:
    assert decode(Job, encode(JOB)) == JOB


def answered(seconds: float) -> Record:
    return Record(0, 0.0, 0.0, seconds, seconds, 4, 8, (seconds,), (8,))


def test_a_load_generator_that_was_the_bottleneck_says_so() -> None:
    assert "use more --processes" in (warning(0.95, 0.0, [answered(1.0)]) or "")
    assert warning(0.5, 0.0, [answered(1.0)]) is None


def test_being_late_matters_against_what_is_measured() -> None:
    assert "50 ms late" in (warning(0.1, 0.05, [answered(0.06)]) or "")
    assert warning(0.1, 0.05, [answered(10.0)]) is None
    # What a timer is late by on any machine is not worth a word.
    assert warning(0.1, 0.002, [answered(0.01)]) is None
    assert warning(0.1, 0.05, []) is None


class Hasty:
    """Answers each request with the next turn of the loop, or fails at the third."""

    wire: Any = type("Wire", (), {"name": "none"})

    def __init__(self, fails: bool) -> None:
        self.begun: list[int] = []
        self.given_up: list[int] = []
        self._fails = fails

    def begin(self, ask: Ask, scheduled: float, done: Callable[[Asked], None]) -> Any:
        self.begun.append(ask.index)
        if len(self.begun) == 3 and self._fails:
            raise MemoryError("no memory for a third")
        now = time.monotonic()
        answered = Asked(ask, scheduled, sent=now, ended=now)
        asyncio.get_running_loop().call_soon(done, answered)
        return lambda: self.given_up.append(ask.index)

    async def finish(self) -> None:
        """Nothing is left."""


def loaded(asker: Any, job: Job) -> None:
    async def main() -> None:
        orders = asyncio.StreamReader()
        orders.feed_data(json.dumps({"start": time.monotonic()}).encode() + b"\n")
        await asyncio.wait_for(Loader(job, asker).run(orders), 10.0)

    asyncio.run(main())


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_a_load_ends_with_its_last_answer(
    concurrency: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = tuple(replace(ask, at=0.01 * at) for at, ask in enumerate(ASKS))
    asker = Hasty(fails=False)
    loaded(asker, replace(JOB, concurrency=concurrency, warmup=(), asks=asks))
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(report["records"]) == len(asker.begun) == 10
    assert report["cut"] == asker.given_up == []


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_what_fails_in_the_load_generator_ends_it(concurrency: int | None) -> None:
    asks = tuple(replace(ask, at=0.01 * at) for at, ask in enumerate(ASKS))
    with pytest.raises(MemoryError, match="third"):
        loaded(Hasty(fails=True), replace(JOB, concurrency=concurrency, warmup=(), asks=asks))
