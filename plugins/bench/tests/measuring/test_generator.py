"""The load generator against a server with scripted response times.

Lower bounds are true however busy the machine is; a test with an upper bound gets three tries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import UsageError
from llmserve_bench import measure
from llmserve_bench.figures import figures_of
from llmserve_bench.generator import LoadShare
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load, Run
from llmserve_bench.targets import Target

from .servers import Running, scripted

pytestmark = pytest.mark.long


def undisturbed(test: Callable[..., None]) -> Callable[..., None]:
    """Try three times: the machine may be busy at times, but a wrong figure is always wrong."""

    @wraps(test)
    def retried(**arguments: Any) -> None:
        for _ in range(2):
            with suppress(AssertionError):
                return test(**arguments)
        return test(**arguments)

    return retried


def run_bench(server: Running, model: str, load: Load, plan: Plan | None = None) -> Run:
    return bench(Target(model, server.url), load, plan or Plan(Prompts())).runs[0]


@undisturbed
def test_whole_answers_take_as_long_as_the_server_took() -> None:
    load = Load(concurrency=4, requests=16)
    with scripted(first=0.4, tokens=(10,)) as server:
        run = run_bench(server, "whole", load)
    figures = figures_of(run, load)
    assert figures["requests"] == 16
    assert 0.4 <= figures["latency_p50"] < 0.8
    assert figures["requests_per_second"] == pytest.approx(16 / run.seconds)
    assert figures["output_tokens_per_second"] == pytest.approx(160 / run.seconds)
    assert "ttft_mean" not in figures


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (1, 4, 4, 3)], ids=["one each", "several"])
@undisturbed
def test_streams_have_the_first_token_and_the_time_between_tokens(tokens: tuple[int, ...]) -> None:
    load = Load(concurrency=4, requests=4, stream=True)
    with scripted(first=0.5, gap=0.3, tokens=tokens) as server:
        run = run_bench(server, "pieces", load)
    figures = figures_of(run, load)
    assert all(record.tokens == tokens for record in run.records)
    assert 0.5 <= figures["ttft_p50"] < 0.8
    assert 1.4 <= figures["latency_p50"] < 1.9
    assert 0.8 < figures["token_time_p50"] * sum(tokens[1:]) < 1.2


def test_a_sequence_is_one_request_with_one_piece_per_step() -> None:
    load = Load(concurrency=2, requests=4, warmup=0, stream=True)
    with scripted(first=0.2, gap=0.1, tokens=(1, 2, 2)) as server:
        run = run_bench(server, "steps", load)
    assert [record.tokens for record in run.records] == [(1, 2, 2)] * 4
    assert min(record.latency for record in run.records) >= 0.4
    assert all(record.finish_reason == "stop" for record in run.records)


def test_an_open_loop_sends_on_schedule_and_latency_counts_from_the_due_time() -> None:
    """A loop that waits for answers would wait forever: none arrives before the last request."""
    load = Load(rate=40, requests=20, arrivals="constant", warmup=0, timeout=30)
    with scripted(first=0.0, tokens=(1,), hold=20) as server:
        run = run_bench(server, "whole", load)
    assert [round(record.scheduled, 5) for record in run.records] == [n / 40 for n in range(20)]
    assert all(record.error is None for record in run.records)
    for record in run.records:
        assert record.latency >= (19 - record.index) / 40 - 1e-5
        assert record.sent >= record.scheduled


def test_a_closed_loop_keeps_its_duration_and_repeats_its_prompts() -> None:
    with scripted(first=0.01, tokens=(1,)) as server:
        run = run_bench(server, "whole", Load(concurrency=2, duration=3.0))
    assert run.seconds == 3.0
    assert len(run.records) > 2
    assert max(record.done for record in run.records) <= 3.0
    indices = [record.index for record in run.records]
    assert len(set(indices)) == len(indices)


@undisturbed
def test_the_last_batch_of_the_warm_up_is_not_in_the_servers_figures() -> None:
    with scripted(tokens=(1,), lagging=True) as server:
        run = run_bench(server, "whole", Load(concurrency=4, requests=4, warmup=2))
    assert run.server is not None
    assert run.server.models[0].requests == 4


def test_a_server_that_dies_ends_the_load_and_its_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "LoadShare", partial(LoadShare, give_up=1.0))
    with scripted(tokens=(1,)) as server:

        def kill(done: int, seconds: float) -> None:
            if done > 20:
                server.kill()

        load = Load(concurrency=4, duration=60.0, warmup=0)
        run = run_bench(server, "whole", load, Plan(Prompts(), on_progress=kill))
    assert len(run.good) > 20
    assert any(record.error == "unreachable" for record in run.records)
    assert "no Triton answers" in (run.ended_early or "")
    # The time without a server is not part of the window.
    assert run.seconds < 60.0


def test_a_comparison_keeps_the_rounds_before_a_server_dies() -> None:
    load = Load(concurrency=2, requests=8, warmup=0)
    with scripted(tokens=(1,)) as server:

        def step(message: str) -> None:
            if "round 2" in message:
                server.kill()

        targets = [Target(name, server.url) for name in ("whole", "pieces")]
        plan = Plan(Prompts(), on_step=step)
        result = measure.compare(targets, [load], plan, rounds=3)
    assert [len(case.runs) for case in result.cases] == [1, 1]
    assert "round 2 of 3" in (result.ended_early or "")


@pytest.mark.parametrize("load", [Load(concurrency=1, requests=2), Load(rate=9, requests=2)])
def test_a_request_that_cannot_be_encoded_is_a_one_line_error(load: Load, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.json"
    dataset.write_text('["not \\ud800 so good"]', encoding="utf-8")
    with scripted() as server, pytest.raises(UsageError, match="UTF-8 cannot encode"):
        run_bench(server, "whole", load, Plan(Prompts(dataset)))


@pytest.mark.parametrize("model", ["whole", "pieces"])
def test_failures_have_a_kind_and_a_message(model: str) -> None:
    load = Load(concurrency=1, requests=12, warmup=0, stream=model == "pieces")
    with scripted(first=0.0, tokens=(1,), fail_every=4) as server:
        run = run_bench(server, model, load)
    failed = [record for record in run.records if record.error]
    assert [record.error for record in failed] == ["rejected"] * 3
    assert "scripted to fail" in (failed[0].message or "")
    assert failed[0].pieces == ()


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    load = Load(concurrency=1, requests=2, warmup=0, timeout=0.5)
    with scripted(first=60.0, tokens=(1,)) as server:
        run = run_bench(server, "whole", load)
    assert [record.error for record in run.records] == ["timeout"] * 2
    assert run.records[0].latency >= 0.5


def test_tokens_that_the_model_does_not_count_are_unknown() -> None:
    load = Load(concurrency=1, requests=2, stream=True)
    with scripted(counts=False) as server:
        run = run_bench(server, "pieces", load)
    assert "output_tokens_per_second" not in figures_of(run, load)
    assert all(a <= b for a, b in pairwise(run.records[0].pieces))
    assert len(run.records[0].pieces) == 4


def test_several_processes_together_send_the_same_load() -> None:
    load = Load(concurrency=4, requests=22, processes=3, warmup=4)
    with scripted(tokens=(1,)) as server:
        run = run_bench(server, "whole", load)
        assert server.answered() == 26
    assert sorted(record.index for record in run.records) == list(range(22))
    assert run.generator.processes == 3
    assert run.generator.cpu > 0
