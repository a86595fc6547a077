"""The load generator against a server whose answers come exactly when a script says.

What is reported is held against the server's own time stamps, so that how busy the machine is
does not decide a test: both processes read the same clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from llmserve.errors import LLMServeError, ModelNotReadyError, UnreachableError, UsageError
from llmserve_bench import measure
from llmserve_bench.figures import figures_of
from llmserve_bench.generator import Job, LoadGenerator
from llmserve_bench.measure import Plan, bench
from llmserve_bench.results import Load, Run
from llmserve_bench.schedule import Prompts, Request
from llmserve_bench.targets import Target

from .scripted_triton import Noted, Running, scripted

# They hold times to a few parts in a hundred, and the server makes them in a process beside.
pytestmark = pytest.mark.alone


def undisturbed(test: Callable[..., None]) -> Callable[..., None]:
    """Try three times: the machine may be busy with something else, a wrong figure is always so."""

    @wraps(test)
    def tried(**given: Any) -> None:
        for _ in range(2):
            with suppress(AssertionError):
                return test(**given)
        return test(**given)

    return tried


def measured(server: Running, model: str, load: Load, plan: Plan | None = None) -> Run:
    return bench(Target(model, server.url), load, plan or Plan(Prompts())).runs[0]


def noted(server: Running, load: Load) -> list[Noted]:
    return server.stop()[load.warmup :]


@undisturbed
def test_whole_answers_take_as_long_as_the_server_took() -> None:
    load = Load(concurrency=4, requests=16)
    with scripted(first=0.5, tokens=(10,)) as server:
        run, seen = measured(server, "whole", load), noted(server, load)
    found = figures_of(run, load)
    assert found["requests"] == len(seen) == 16
    took = [one.went[0] - one.came for one in seen]
    # A little more than the server's own: the way there and back.
    assert fmean(took) <= found["latency_mean"] == pytest.approx(fmean(took), rel=0.06)
    assert median(took) <= found["latency_p50"] == pytest.approx(median(took), rel=0.06)
    window = max(one.went[-1] for one in seen) - min(one.came for one in seen)
    assert found["requests_per_second"] == pytest.approx(16 / window, rel=0.02)
    assert found["output_tokens_per_second"] == pytest.approx(160 / window, rel=0.02)
    assert found["in_flight"] == pytest.approx(4, rel=0.03)
    assert "ttft_mean" not in found


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (1, 4, 4, 3)], ids=["one each", "several"])
@undisturbed
def test_streams_tell_the_first_token_and_the_time_between_tokens(tokens: tuple[int, ...]) -> None:
    load = Load(concurrency=8, requests=8, stream=True)
    with scripted(first=0.5, gap=0.3, tokens=tokens) as server:
        run, seen = measured(server, "pieces", load), noted(server, load)
    found = figures_of(run, load)
    between = [(one.went[-1] - one.went[0]) / sum(tokens[1:]) for one in seen]
    assert found["ttft_p50"] == pytest.approx(median(s.went[0] - s.came for s in seen), rel=0.02)
    assert found["latency_p50"] == pytest.approx(
        median(s.went[-1] - s.came for s in seen), rel=0.02
    )
    assert found["token_time_p50"] == pytest.approx(median(between), rel=0.02)
    assert all(record.tokens == tokens for record in run.records)


@undisturbed
def test_a_sequence_is_one_request_with_a_piece_a_step() -> None:
    load = Load(concurrency=2, requests=4, warmup=0, stream=True)
    with scripted(first=0.2, gap=0.1, tokens=(1, 2, 2)) as server:
        run = measured(server, "steps", load)
    assert [record.tokens for record in run.records] == [(1, 2, 2)] * 4
    assert median(record.latency for record in run.records) == pytest.approx(0.4, rel=0.1)
    assert all(record.finish_reason == "stop" for record in run.records)


@undisturbed
def test_an_open_loop_sends_when_it_is_due_whatever_the_server_does() -> None:
    load = Load(rate=40, requests=40, arrivals="constant", warmup=0)
    with scripted(first=0.3, tokens=(1,)) as server:
        run, seen = measured(server, "whole", load), noted(server, load)
    assert [round(record.scheduled, 5) for record in run.records] == [n / 40 for n in range(40)]
    came = sorted(one.came for one in seen)
    assert came[-1] - came[0] == pytest.approx(39 / 40, rel=0.02)
    assert run.generator.late < 0.05


@undisturbed
def test_a_stalled_server_is_seen_in_the_latency_of_all_that_had_to_wait() -> None:
    # 100 requests in 2 s, and from 0.5 s to 1.5 s nothing is answered. A loop that waits for
    # answers would send but few meanwhile, and report one slow answer among a hundred.
    load = Load(rate=50, requests=100, arrivals="constant", warmup=0)
    with scripted(first=0.01, tokens=(1,), stall_at=0.5, stall=1.0) as server:
        run = measured(server, "whole", load)
    found = figures_of(run, load)
    # Half of all requests come while it stalls, and wait for half a second on average.
    assert sum(r.latency > 0.1 for r in run.records) == pytest.approx(45, abs=4)
    assert found["latency_mean"] == pytest.approx(0.01 + 0.5 * 0.5, rel=0.1)
    assert found["latency_p90"] == pytest.approx(0.82, rel=0.06)


@undisturbed
def test_a_closed_loop_keeps_to_its_duration_and_repeats_its_prompts() -> None:
    with scripted(first=0.1, tokens=(1,)) as server:
        run = measured(server, "whole", Load(concurrency=2, duration=1.05))
    assert run.seconds == 1.05
    assert 16 <= len(run.records) <= 20
    assert len(run.unfinished) == 2
    assert max(record.done for record in run.records) <= 1.05
    indices = [record.index for record in run.records]
    assert len(set(indices)) == len(indices)


def test_the_last_batch_of_the_warm_up_is_no_part_of_what_the_server_did() -> None:
    with scripted(first=0.05, tokens=(1,), counted_after=0.3) as server:
        run = measured(server, "whole", Load(concurrency=4, requests=4, warmup=2))
    assert run.server is not None
    assert run.server.models[0].requests == 4


def test_a_server_that_dies_ends_the_load_and_what_it_answered_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "Job", partial(Job, give_up=1.0))
    with scripted(first=0.05, tokens=(1,)) as server:

        def kill(done: int, seconds: float) -> None:
            if done > 20:
                server.process.kill()

        began = time.monotonic()
        load = Load(concurrency=4, duration=30.0, warmup=0)
        run = measured(server, "whole", load, Plan(Prompts(), on_progress=kill))
        assert time.monotonic() - began < 15
    assert len(run.good) > 20
    # It asks again and again whether it is back, but does not run in circles.
    assert 4 <= sum(record.error == "unreachable" for record in run.records) < 100
    assert "no Triton answers" in (run.ended_early or "")
    # The time in which nobody was there is no part of the window.
    assert run.seconds < 5.0


def test_a_server_that_dies_leaves_the_rounds_of_a_comparison_before_it() -> None:
    load = Load(concurrency=2, requests=8, warmup=0)
    with scripted(first=0.02, tokens=(1,)) as server:

        def step(message: str) -> None:
            if "round 2" in message:
                server.process.kill()
                server.process.wait()

        targets = [Target(name, server.url) for name in ("whole", "pieces")]
        plan = Plan(Prompts(), on_step=step)
        result = measure.compare(targets, [load], plan, rounds=3, title="")
    assert [len(case.runs) for case in result.cases] == [1, 1]
    assert (result.ended_early or "").startswith("round 2 of 3")


def test_a_server_that_comes_back_is_asked_again() -> None:
    with scripted(first=0.05, tokens=(1,)) as server:
        port = int(server.url.rpartition(":")[2])
        again: list[Running] = []

        def restart(done: int, seconds: float) -> None:
            if not again and done > 10:
                server.process.kill()
                server.process.wait()
                again.append(Running(server.script, port))

        load = Load(concurrency=2, duration=6.0, warmup=0)
        run = measured(server, "whole", load, Plan(Prompts(), on_progress=restart))
        assert len(again[0].stop()) > 5
    assert run.ended_early is None
    assert run.records[-1].error is None


def test_a_request_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.json"
    dataset.write_text('["not \\ud800 so good"]', encoding="utf-8")
    for load in (Load(concurrency=1, requests=2, warmup=0), Load(rate=9, requests=2, warmup=0)):
        with scripted() as server, pytest.raises(UsageError, match="UTF-8 cannot carry"):
            measured(server, "whole", load, Plan(Prompts(dataset)))


@pytest.mark.parametrize("model", ["whole", "pieces"])
def test_failures_are_told_by_kind_and_message(model: str) -> None:
    load = Load(concurrency=1, requests=12, warmup=0, stream=model == "pieces")
    with scripted(first=0.02, tokens=(1,), fail_every=4) as server:
        run = measured(server, model, load)
    failed = [record for record in run.records if record.error]
    assert [record.error for record in failed] == ["rejected"] * 3
    assert "scripted to fail" in (failed[0].message or "")
    assert failed[0].pieces == ()


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    load = Load(concurrency=1, requests=2, warmup=0, timeout=0.2)
    with scripted(first=1.5, tokens=(1,)) as server:
        run = measured(server, "whole", load)
    assert [record.error for record in run.records] == ["timeout"] * 2
    assert 0.2 <= run.records[0].latency < 1.0


def test_tokens_that_the_model_does_not_count_are_unknown() -> None:
    load = Load(concurrency=1, requests=2, stream=True)
    with scripted(first=0.02, gap=0.02, counts=False) as server:
        run = measured(server, "pieces", load)
    assert "output_tokens_per_second" not in figures_of(run, load)
    assert len(run.records[0].pieces) == 4


@undisturbed
def test_several_processes_make_the_same_load_together() -> None:
    load = Load(concurrency=4, requests=22, processes=3, warmup=4)
    with scripted(first=0.1, tokens=(1,)) as server:
        run, seen = measured(server, "whole", load), noted(server, load)
    assert sorted(record.index for record in run.records) == list(range(22))
    assert run.generator.processes == 3
    assert run.generator.cpu > 0
    assert len(seen) == 22
    assert figures_of(run, load)["in_flight"] == pytest.approx(4, rel=0.25)


def test_shares_of_a_load_together_are_the_whole() -> None:
    requests = [Request(at, "x", {}) for at in range(7)]
    job = Job("", "m", True, Load(concurrency=4), requests[:3], requests, 7)
    shares = job.split(3)
    assert sum(share.load.concurrency or 0 for share in shares) == 4
    assert sorted(r.index for share in shares for r in share.requests) == list(range(7))
    assert len(job.split(64)) == 4


def test_a_generator_that_ends_by_itself_is_told() -> None:
    load = Load(concurrency=1, requests=1)
    with scripted() as server:
        job = Job(server.url, "whole", True, load, [], [Request(0, "x", {})], 1)
        with LoadGenerator([job]) as processes:
            processes.warm_up()
            for worker in processes._workers.values():
                worker.kill()
                worker.wait()
            with pytest.raises(LLMServeError, match="by itself"):
                processes.run(lambda done, seconds: None)


def test_nobody_there_and_no_such_model_are_one_line() -> None:
    load, plan = Load(concurrency=1, requests=1), Plan(Prompts())
    with pytest.raises(UnreachableError, match="no Triton answers"):
        bench(Target("whole", "127.0.0.1:9"), load, plan)
    with scripted() as server, pytest.raises(ModelNotReadyError):
        bench(Target("nope", server.url), load, plan)
