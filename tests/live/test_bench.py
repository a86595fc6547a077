"""Measurements of models that a real Triton serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.measure.bench import Target, bench
from llmserve.measure.job import Place
from llmserve.measure.plan import Lengths, Prompts
from llmserve.measure.results import Comparison, Sweep, load
from llmserve.measure.runs import Load
from llmserve.measure.summary import summarize
from llmserve.testing import LiveTriton
from tests.live.commands import run

PROMPTS = Prompts(input_tokens=Lengths(12, 4), output_tokens=Lengths(10, 3))


def target(triton: LiveTriton, model: str) -> Target:
    server = triton.server
    return Target(
        model,
        Place(server.grpc_url),
        repository=triton.repository,
        metrics_url=server.metrics_url,
        server=server.runtime,
    )


def test_whole_answers_are_counted_as_triton_counts_them(triton: LiveTriton) -> None:
    model = triton.build("hf", max_batch_size=4)
    found = bench(target(triton, model), Load.closed(4, requests=16, warmup=2), PROMPTS)
    figures = summarize(found)
    assert figures.completed == 16
    assert found.server is not None
    by_triton = found.server.models[0]
    # The warm-up is no part of it, and batches are fewer than requests.
    assert by_triton.requests == by_triton.inferences == 16
    assert by_triton.executions < 16
    assert sum(by_triton.batches.values()) == by_triton.executions
    # Triton counts an answer until it has let go of it, so a little longer than we wait.
    waited = sum(record.done - record.sent for record in found.records)
    assert 0.5 * waited < by_triton.success < 1.5 * waited


def test_made_up_prompts_and_answers_have_the_lengths_asked_for(triton: LiveTriton) -> None:
    model = triton.build("hf", max_batch_size=4)
    asked = Prompts(input_tokens=Lengths(20), output_tokens=Lengths(7))
    found = bench(target(triton, model), Load.closed(2, requests=6), asked)
    assert {record.input_tokens for record in found.records} == {20}
    assert {record.output_tokens for record in found.records} == {7}


@pytest.mark.parametrize("batching", ["iterative", "static"])
def test_streams_bring_every_token_at_its_time(triton: LiveTriton, batching: str) -> None:
    model = triton.build("iterative", batching=batching)
    load = Load.closed(4, requests=12, stream=True)
    found = bench(target(triton, model), load, PROMPTS)
    assert summarize(found).errors == {}
    for record in found.records:
        assert sum(record.tokens) == record.output_tokens
        assert list(record.pieces) == sorted(record.pieces)
        assert record.scheduled <= record.sent < record.pieces[0]
        assert record.pieces[-1] <= record.done
    ttft, latency = summarize(found).ttft, summarize(found).latency
    assert ttft is not None
    assert latency is not None
    assert ttft.mean < latency.mean
    if batching == "iterative":
        assert found.server is not None
        told = found.server.metrics["llmserve_output_tokens_total"]
        assert told <= sum(record.output_tokens or 0 for record in found.records)


def test_the_command_measures_a_dataset_of_seed_003s_form(
    triton: LiveTriton, tmp_path: Path
) -> None:
    model = triton.build("hf", max_batch_size=4)
    dataset = tmp_path / "mini.json"
    entries = [
        {"input": f"Article {n}.", "instruction": "Summarize it:", "output": "So it is. " * n}
        for n in range(1, 5)
    ]
    dataset.write_text(json.dumps(entries))
    done = run(
        "bench", model, "--url", triton.server.grpc_url, "--repository", str(triton.repository),
        "--metrics-url", triton.server.metrics_url, "--dataset", str(dataset),
        "--requests", "8", "--concurrency", "8", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "OP tokens/sec" in done.stdout
    assert "Server: avg. batch size" in done.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    lengths = [record["output_tokens"] for record in content["records"]]
    assert lengths[:4] == sorted(set(lengths[:4]))
    assert lengths[:4] == lengths[4:]


def test_compare_builds_a_pair_serves_it_and_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    done = run(
        "compare", "--pair", "static-inflight", "--model", "demo", "--rounds", "1",
        "--requests", "6", "--concurrency", "3", "--output-tokens", "8,4",
        "--build", "max_batch_size=4", "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = load(path)
    assert isinstance(found, Comparison)
    assert [subject.name for subject in found.subjects] == ["static", "inflight"]
    assert found.subjects[0].build["max_batch_size"] == "4"
    assert [len(cell.runs[0].records) for cell in found.cells] == [6, 6]
    assert "1 round is too few" in found.ratios[0].why


def test_a_sweep_builds_serves_measures_and_ranks(tmp_path: Path) -> None:
    state = tmp_path / "sweep.json"
    words = (
        "sweep", "demo", "--plugin", "hf", "--vary", "dtype=float32,float33",
        "--vary", "concurrency=1,4", "--rounds", "1", "--requests", "6",
        "--output-tokens", "8", "--state", str(state),
    )  # fmt: skip
    done = run(*words)
    assert done.returncode == 0, done.stderr
    found = load(state)
    assert isinstance(found, Sweep)
    assert [variant.state for variant in found.variants] == ["done", "done", "failed", "failed"]
    assert "float33" in found.variants[2].why
    done_first = sorted(found.variants[:2], key=lambda v: -(v.throughput or 0.0))
    assert found.ranking == tuple(variant.name for variant in done_first)
    # A sweep that is complete is not measured again.
    again = run(*words)
    assert again.stdout == done.stdout
    assert "building" not in again.stderr
