"""Every command, on models served by a real Triton."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import llmserve
from llmserve.errors import UsageError
from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton, run
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.output import load
from llmserve_bench.prompts import Lengths, Prompts
from llmserve_bench.results import Load
from llmserve_bench.targets import Target

pytestmark = pytest.mark.long

PLAN = Plan(Prompts(input_tokens=Lengths(12, 4), output_tokens=Lengths(10, 3)))


def target(triton: LiveTriton, model: str) -> Target:
    server = triton.server
    return Target(
        model, server.grpc_url, repository=triton.repository, metrics_url=server.metrics_url
    )


# Counts tokens without torch.
LIGHT = ("--build", "tokenizer=tokenizers")


def stdout_of(*words: str) -> str:
    result = run(*words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_whole_answers_are_counted_as_triton_counts_them(triton: LiveTriton) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    measured_load = Load(concurrency=4, requests=16, warmup=2)
    plan = replace(PLAN, prompts=Prompts(input_tokens=Lengths(20), output_tokens=Lengths(7)))
    (measured,) = bench(target(triton, model), measured_load, plan).runs
    assert {(r.input_tokens, r.output_tokens, r.error) for r in measured.records} == {(20, 7, None)}
    assert measured.server is not None
    by_triton = measured.server.models[0]
    # The warm-up is not included, and there are fewer batches than requests.
    assert by_triton.requests == by_triton.inferences == 16
    assert by_triton.executions < 16
    # Triton counts in nanoseconds, we in seconds.
    waited = sum(record.done - record.sent for record in measured.records)
    assert 0.1 * waited < by_triton.success < 10 * waited


def test_streams_deliver_every_token_with_its_time(triton: LiveTriton) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    measured_load = Load(concurrency=4, requests=12, stream=True)
    (measured,) = bench(target(triton, model), measured_load, PLAN).runs
    for record in measured.records:
        assert record.error is None
        assert sum(record.tokens) == record.output_tokens
        assert list(record.pieces) == sorted(record.pieces)
        assert record.scheduled <= record.sent < record.pieces[0]
        assert record.pieces[-1] <= record.done
    figures = figures_of(measured, measured_load)
    assert figures["ttft_mean"] < figures["latency_mean"]


def test_images_are_shown_to_a_model_that_reads_them_and_to_no_other(
    triton: LiveTriton, tmp_path: Path
) -> None:
    from llmserve.testing.tiny_seeing import picture, save_seeing

    model = triton.build("hf", str(save_seeing("llava", tmp_path / "seeing")))
    picture(1).save(tmp_path / "a.png")
    shown = Load(concurrency=2, requests=4, warmup=0, images=("", str(tmp_path / "a.png")))
    (measured,) = bench(target(triton, model), shown, PLAN).runs
    assert not any(record.error for record in measured.records)
    (measured,) = bench(target(triton, model), replace(shown, images=shown.images[1:]), PLAN).runs
    # 16 tokens stand for an image, beside those of the prompt and of the template.
    assert min(record.input_tokens or 0 for record in measured.records) > 16
    text = triton.build("hf", tokenizer="tokenizers")
    with pytest.raises(UsageError, match="reads only text"):
        bench(target(triton, text), shown, PLAN)


def test_an_ensemble_is_measured_with_its_parts_and_its_stand_in(triton: LiveTriton) -> None:
    model = triton.build("gpt2-torchscript", tokenizer="tokenizers")
    measured_load = Load(concurrency=2, requests=4, warmup=1, stream=True)
    result = bench(target(triton, model), measured_load, PLAN)
    (measured,) = result.runs
    assert measured.good == list(measured.records)
    assert measured.server is not None
    assert {figures.model for figures in measured.server.models} >= {model, f"{model}_generator"}
    assert set(measured.server.stand_ins) == {f"{model}_generator"}
    assert result.cases[0].name == f"{model} (stand-in)"
    # Without metrics, Triton's configuration still shows what runs the backend.
    without_metrics = replace(target(triton, model), metrics_url="http://127.0.0.1:1/metrics")
    (measured,) = bench(without_metrics, measured_load, PLAN).runs
    assert measured.server is not None
    assert set(measured.server.stand_ins) == {f"{model}_generator"}


def test_bench_measures_a_dataset(triton: LiveTriton, tmp_path: Path) -> None:
    model = triton.build("hf", tokenizer="tokenizers")
    entries = [
        {"input": f"Article {n}.", "instruction": "Sum:", "output": "So it is. " * n}
        for n in range(1, 5)
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    printed = stdout_of(
        "bench", model, "--url", triton.server.grpc_url, "--repository", str(triton.repository),
        "--metrics-url", triton.server.metrics_url, "--dataset", str(tmp_path / "data.json"),
        "--requests", "8", "--concurrency", "8", "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    assert "Output tokens/s" in printed
    assert "Server: rows per batch" in printed
    lengths = [record.output_tokens or 0 for record in load(tmp_path / "out.json").runs[0].records]
    assert lengths[:4] == lengths[4:] == sorted(set(lengths[:4]))


@pytest.fixture(scope="module")
def converted(request: pytest.FixtureRequest) -> Path:
    """The demo model as OpenVINO loads it, without torch; made once, because that takes long."""
    versions = "-".join(version(name) for name in ("llmserve", "openvino", "transformers"))
    folder = Path(request.config.cache.mkdir(f"demo-for-openvino-{versions}")) / "demo"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = llmserve.build("openvino", "demo", output=Path(scratch, "repository"))
            made = Path(shutil.copytree(built.folder / "1" / "openvino", Path(scratch, "demo")))
            for path in demo_model_path().glob("*.json"):
                shutil.copy(path, made)
            # Another worker may have been faster.
            with suppress(OSError):
                made.rename(folder)
    return folder


def test_compare_builds_and_serves_two_variants(tmp_path: Path, converted: Path) -> None:
    stdout_of(
        "compare", "few=openvino:max_sequences=2", "many=openvino:",
        "--model", str(converted), *LIGHT,
        "--build", "max_batch_size=4", "--rounds", "1", "--requests", "6", "--concurrency", "3",
        "--output-tokens", "8,4", "--json", str(tmp_path / "compared.json"),
        "--report", str(tmp_path / "report"), "--answers",
    )  # fmt: skip
    result = load(tmp_path / "compared.json")
    assert [case.subject.name for case in result.cases] == ["few", "many"]
    few, many = result.losses
    assert (few.alike, many.alike) == (1.0, 1.0)
    assert few.perplexity == pytest.approx(many.perplexity, rel=1e-3)
    assert (few.perplexity or 0) > 1
    # Of a process with this engine, and no multiple of it.
    assert 100e6 < (many.memory or 0) < 4e9
    builds = [case.subject.build for case in result.cases]
    assert [build["max_batch_size"] for build in builds] == ["4", "4"]
    assert builds[0]["max_sequences"] == "2"
    assert [len(run.records) for run in result.runs] == [6, 6]
    assert (tmp_path / "report" / "report.html").exists()


def test_a_sweep_builds_serves_measures_and_ranks(tmp_path: Path) -> None:
    printed = stdout_of(
        "sweep", "demo", "--plugin", "hf", *LIGHT, "--vary", "device=cpu,cuda:7", "--vary",
        "concurrency=1,4", "--rounds", "1", "--requests", "6", "--output-tokens", "8",
        "--limit-latency", "60000", "--json", str(tmp_path / "sweep.json"),
    )  # fmt: skip
    result = load(tmp_path / "sweep.json")
    # A variant that cannot be served fails, and the others are measured.
    assert [case.state for case in result.cases] == ["done", "done", "failed", "failed"]
    assert all(case.why for case in result.cases[2:])
    assert printed.count("| within") == 2
    content = json.loads((tmp_path / "sweep.json").read_text())
    rates = [place["throughput"] for place in content["summary"]["ranking"]]
    assert rates == sorted(rates, reverse=True)
