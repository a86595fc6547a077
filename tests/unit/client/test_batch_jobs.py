"""Which lines of a batch are left, and when each may be asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from llmserve.client.batches.answers import open_answers
from llmserve.client.batches.jobs import BatchJob
from llmserve.client.batches.requests import BatchRequests

ROOM = 8
MakeJob = Callable[..., BatchJob]


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[MakeJob]:
    """Make a job with a line for each model."""
    with ExitStack() as stack:

        def make(*models: str, **body: Any) -> BatchJob:
            lines = (
                {"custom_id": str(n), "url": "/v1/completions", "body": {"model": model, **body}}
                for n, model in enumerate(models, 1)
            )
            path = tmp_path / "in.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            requests = stack.enter_context(closing(BatchRequests(path)))
            return BatchJob(requests, stack.enter_context(open_answers(tmp_path / "out", requests)))

        yield make


def test_models_whose_lines_are_asked_are_not_looked_at_any_more(job_of: MakeJob) -> None:
    async def go() -> None:
        job = job_of("a", "b", "a")
        first = job.next(0.0, ROOM)
        assert first
        job.hold("a", 1.0)
        second = job.next(0.0, ROOM)
        assert second
        assert (first.request.model, second.request.model) == ("a", "b")
        job.put_back(second)
        assert job.next(0.0, ROOM) is second
        job.put_back(first)
        found = [job.next(1.0, ROOM), job.next(1.0, ROOM), job.next(1.0, ROOM)]
        assert [each and each.request.number for each in found] == [1, 3, None]

    asyncio.run(go())


def test_lines_of_a_model_wait_until_it_is_back_whichever_it_has_died_of(job_of: MakeJob) -> None:
    async def go() -> None:
        job = job_of("a", "a", "b")
        assert job.next(0.0, ROOM)
        # That line was asked for the last time.
        job.has_died("a")
        left = job.next(0.0, ROOM)
        assert left
        assert left.request.model == "b"
        assert job.next(0.0, ROOM) is None
        assert job.away(0.0) == ["a"]
        job.has_returned("a")
        assert job.next(0.0, ROOM)

    asyncio.run(go())


def test_suspects_wait_longer_and_longer_and_none_forever(job_of: MakeJob) -> None:
    async def go() -> None:
        job = job_of("a", "a", "b")
        suspects = [job.next(0.0, ROOM), job.next(0.0, ROOM)]
        for suspect in suspects:
            assert suspect
            suspect.deaths = 1
            job.put_back(suspect)
        waits, now = [], 0.0
        for _ in range(2000):
            assert job.away(now) == ["a"]
            assert not job.has_suspect(now)
            job.is_still_away("a", now)
            assert job.away(now) == []
            waits.append(min(w for w in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0) if job.away(now + w)))
            now += waits[-1]
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 1995]
        job.has_returned("a")
        assert job.away(now) == []
        assert [job.next_suspect(now), job.next_suspect(now)] == suspects
        assert job.next_suspect(now) is None

    asyncio.run(go())


def test_lines_that_a_full_model_has_refused_keep_their_places(job_of: MakeJob) -> None:
    """What it refuses is asked again later; as many others go on as have room beside it."""

    async def go() -> None:
        job = job_of("a", "a", "a", "b")
        first = job.next(0.0, 2)
        assert first
        job.rest(first, 5.0)
        job.running["a"] = 1
        other = job.next(0.0, 2)
        assert other
        assert other.request.model == "b", "one of the two places of the model is refused"
        assert job.next(0.0, 2) is None
        job.running["a"] = 0
        second = job.next(0.0, 2)
        assert second
        assert second.request.number == 2
        assert job.next(5.0, 2) is first
        third = job.next(5.0, 2)
        assert third
        assert third.request.number == 3

    asyncio.run(go())


def test_patience_is_that_of_all_lines_together(job_of: MakeJob) -> None:
    async def go() -> None:
        job = job_of("a", "a")
        assert not job.gives_up("a", at=11.0, patience=10.0, now=1.0)
        assert job.gives_up("a", at=11.5, patience=10.0, now=10.5)
        job.has_answered("a")
        assert not job.gives_up("a", at=12.0, patience=10.0, now=11.0)
        assert not job.gives_up("a", at=9000.0, patience=None, now=11.0)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("prompt", "is_ascii"), [("\u732b" * 200, False), ([*range(10)] * 20, True), ("\ud800", True)]
)
def test_what_is_asked_for_a_line_is_not_larger_than_the_line(
    tmp_path: Path, prompt: Any, is_ascii: bool
) -> None:
    body = {"model": "m", "prompt": prompt}
    asked = {"custom_id": "1", "url": "/v1/completions", "body": body}
    path = tmp_path / "requests.jsonl"
    text = json.dumps(asked, ensure_ascii=is_ascii, separators=(",", ":"))
    path.write_text(text, encoding="utf-8")
    with (
        closing(BatchRequests(path)) as requests,
        open_answers(tmp_path / "o", requests) as answers,
    ):
        first = BatchJob(requests, answers).next(0.0, ROOM)
        assert first
        content = first.body()
    assert json.loads(content) == body
    assert len(content) < path.stat().st_size
    content.decode()
