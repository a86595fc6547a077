"""Every command on models that a real Triton serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.registry import Registry
from llmserve.testing import LiveTriton
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.output import load
from llmserve_bench.prompts import Lengths, Prompts
from llmserve_bench.results import Load
from llmserve_bench.targets import Target, Variant, find_pairs, parse_subject
from tests.support import run

PLAN = Plan(Prompts(input_tokens=Lengths(12, 4), output_tokens=Lengths(10, 3)))


def target(triton: LiveTriton, model: str) -> Target:
    server = triton.server
    return Target(
        model, server.grpc_url, repository=triton.repository, metrics_url=server.metrics_url
    )


# To count tokens by it takes no torch.
LIGHT = ("--build", "tokenizer=tokenizers")


def printed_by(*words: str) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_answers_are_counted_as_triton_counts_them(triton: LiveTriton) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    measured_load = Load(concurrency=4, requests=16, warmup=2)
    plan = replace(PLAN, prompts=Prompts(input_tokens=Lengths(20), output_tokens=Lengths(7)))
    (found,) = bench(target(triton, model), measured_load, plan).runs
    assert {(r.input_tokens, r.output_tokens, r.error) for r in found.records} == {(20, 7, None)}
    assert found.server is not None
    by_triton = found.server.models[0]
    # The warm-up is no part of it, and batches are fewer than requests.
    assert by_triton.requests == by_triton.inferences == 16
    assert by_triton.executions < 16
    # Triton counts in nanoseconds, we in seconds.
    waited = sum(record.done - record.sent for record in found.records)
    assert 0.1 * waited < by_triton.success < 10 * waited


def test_streams_bring_every_token_at_its_time(triton: LiveTriton) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    measured_load = Load(concurrency=4, requests=12, stream=True)
    (found,) = bench(target(triton, model), measured_load, PLAN).runs
    for record in found.records:
        assert record.error is None
        assert sum(record.tokens) == record.output_tokens
        assert list(record.pieces) == sorted(record.pieces)
        assert record.scheduled <= record.sent < record.pieces[0]
        assert record.pieces[-1] <= record.done
    figures = figures_of(found, measured_load)
    assert figures["ttft_mean"] < figures["latency_mean"]


def test_an_ensemble_is_measured_with_its_parts_and_its_stand_in(triton: LiveTriton) -> None:
    model = triton.build("gpt2-torchscript", tokenizer="tokenizers")
    measured_load = Load(concurrency=2, requests=4, warmup=1, stream=True)
    result = bench(target(triton, model), measured_load, PLAN)
    (found,) = result.runs
    assert found.good == list(found.records)
    assert found.server is not None
    assert {one.model for one in found.server.models} >= {model, f"{model}_generator"}
    assert set(found.server.stand_ins) == {f"{model}_generator"}
    assert result.cases[0].name == f"{model} (stand-in)"
    # Without metrics, Triton's configuration still says what runs the backend.
    blind = replace(target(triton, model), metrics_url="http://127.0.0.1:1/metrics")
    (found,) = bench(blind, measured_load, PLAN).runs
    assert found.server is not None
    assert set(found.server.stand_ins) == {f"{model}_generator"}


def test_bench_measures_a_dataset(triton: LiveTriton, tmp_path: Path) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    entries = [
        {"input": f"Article {n}.", "instruction": "Sum:", "output": "So it is. " * n}
        for n in range(1, 5)
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    printed = printed_by(
        "bench", model, "--url", triton.server.grpc_url, "--repository", str(triton.repository),
        "--metrics-url", triton.server.metrics_url, "--dataset", str(tmp_path / "data.json"),
        "--requests", "8", "--concurrency", "8", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert "Output tokens/s" in printed
    assert "Server: rows per batch" in printed
    lengths = [record.output_tokens or 0 for record in load(tmp_path / "out.json").runs[0].records]
    assert lengths[:4] == lengths[4:] == sorted(set(lengths[:4]))


def test_compare_builds_a_pair_serves_it_and_takes_it_away(tmp_path: Path) -> None:
    printed_by(
        "compare", "--pair", "static-inflight", "--model", "demo", *LIGHT,
        "--build", "max_batch_size=4", "--rounds", "1", "--requests", "6", "--concurrency", "3",
        "--output-tokens", "8,4", "--json", str(tmp_path / "pair.json"),
        "--report", str(tmp_path / "report"),
    )  # fmt: skip
    found = load(tmp_path / "pair.json")
    assert [case.subject.name for case in found.cases] == ["static", "inflight"]
    # What the user gives goes before the pair's own sizes, but does not undo what it compares.
    builds = [case.subject.build for case in found.cases]
    assert [build["max_batch_size"] for build in builds] == ["4", "4"]
    assert builds[0]["batching"] == "static"
    assert [len(run.records) for run in found.runs] == [6, 6]
    assert (tmp_path / "report" / "report.html").exists()


def test_a_sweep_builds_serves_measures_and_ranks(tmp_path: Path) -> None:
    printed = printed_by(
        "sweep", "demo", "--plugin", "hf", *LIGHT, "--vary", "device=cpu,cuda:7", "--vary",
        "concurrency=1,4", "--rounds", "1", "--requests", "6", "--output-tokens", "8",
        "--limit-latency", "60000", "--json", str(tmp_path / "sweep.json"),
    )  # fmt: skip
    found = load(tmp_path / "sweep.json")
    # What cannot be served has failed, and the others go on.
    assert [case.state for case in found.cases] == ["done", "done", "failed", "failed"]
    assert all(case.why for case in found.cases[2:])
    assert printed.count("| within") == 2
    content = json.loads((tmp_path / "sweep.json").read_text())
    rates = [place["throughput"] for place in content["summary"]["ranking"]]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("name", find_pairs(Registry.load()))
def test_every_ready_made_pair_can_be_built(name: str) -> None:
    registry = Registry.load()
    pair = find_pairs(registry)[name]
    for text in (pair.first, pair.second):
        variant = parse_subject(text)
        assert isinstance(variant, Variant)
        assert variant.known(registry)
