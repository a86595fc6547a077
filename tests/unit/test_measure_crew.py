"""The processes that make a load: how work is dealt out, and when their figures are doubted."""

from __future__ import annotations

import pytest

from llmserve.client.model import ModelInfo
from llmserve.measure.codec import decode, encode
from llmserve.measure.crew import warning
from llmserve.measure.job import Ask, Job, Place, split
from llmserve.measure.runs import Record

MODEL = ModelInfo("demo", "unary", True, 8, {}, {})
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
