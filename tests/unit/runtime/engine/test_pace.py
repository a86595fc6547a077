"""In which pieces a long prompt is read: in such that streams go on, and no smaller ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmserve.runtime import ArrayLogits, Chunk, Engine
from llmserve.runtime.engine.pace import Pace
from llmserve.testing import ByteTokenizer
from llmserve.testing.fake import generation
from tests.recall import RecallRunner

LONG = [(7 * i) % 50 for i in range(1200)]


class TimedRunner(RecallRunner):
    """A runner whose passes take a tenth of a second, and five milliseconds for each token."""

    now = 0.0

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        self.now += 0.1 + 0.005 * sum(len(chunk.ids) for chunk in chunks)
        return super().run(chunks)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> TimedRunner:
    runner = TimedRunner(400)
    monkeypatch.setattr("time.perf_counter", lambda: runner.now)
    return runner


def pieces(runner: RecallRunner) -> list[int]:
    return [len(chunks[-1].ids) for chunks in runner.passes if not chunks[-1].single]


def test_a_stream_waits_half_a_second_at_most_for_a_prompt_that_is_read(
    runner: TimedRunner,
) -> None:
    engine = Engine(runner, ByteTokenizer(), max_sequences=2)
    engine.admit(stream := generation([1], 100))
    engine.step()
    engine.admit(prompt := generation(LONG, 2))
    gaps = []
    while not prompt.token_ids:
        before, count = runner.now, len(stream.token_ids)
        engine.step()
        assert len(stream.token_ids) == count + 1
        gaps.append(runner.now - before)
    assert max(gaps) <= 0.5
    assert max(pieces(runner)) >= 70, "no smaller than they have to be"


def test_a_prompt_that_nobody_waits_for_is_read_in_large_pieces(runner: TimedRunner) -> None:
    engine = Engine(runner, ByteTokenizer(), max_sequences=2)
    engine.admit(generation(LONG, 2))
    while engine.busy:
        engine.step()
    assert pieces(runner) == [64, 256, 256, 256, 256, 112]


def test_a_pause_of_the_machine_is_soon_forgotten() -> None:
    pace = Pace(256)
    pace.measured(64, 60.0)
    read = [pace.tokens(answers_wait=True)]
    for _ in range(6):
        pace.measured(read[-1], 0.1 + 0.001 * read[-1])
        read.append(pace.tokens(answers_wait=True))
    assert read[0] == 64
    assert read[-1] == 256


def test_no_more_is_read_than_a_build_allows() -> None:
    pace = Pace(10)
    pace.measured(10, 1e-6)
    assert pace.tokens(answers_wait=False) == 10
