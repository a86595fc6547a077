"""Measurements of ensembles and of sequences, by a real Triton with stand-ins in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.measure.bench import Target, bench
from llmserve.measure.compare import compare
from llmserve.measure.job import Place
from llmserve.measure.pairs import PAIRS
from llmserve.measure.plan import Lengths, Prompts
from llmserve.measure.runs import Load, Run
from llmserve.measure.standins import marked
from llmserve.measure.subjects import Built, parse_subject, with_defaults
from llmserve.measure.summary import summarize
from llmserve.measure.table import rows
from llmserve.registry import Registry
from llmserve.testing import LiveTriton
from tests.live.commands import run

PROMPTS = Prompts(input_tokens=Lengths(12), output_tokens=Lengths(6))
ONNX, TENSORRT = "Triton's backend onnxruntime", "TensorRT-LLM"
STOOD_IN = {"gpt2-onnx": ONNX, "trtllm": TENSORRT}
ENGINE = Path(__file__).parents[2] / "plugins/trtllm/tests/trtllm_builds/engines/1.2"


def target(triton: LiveTriton, model: str, *, metrics: bool = True) -> Target:
    server = triton.server
    return Target(
        model,
        Place(server.grpc_url),
        repository=triton.repository,
        metrics_url=server.metrics_url if metrics else "http://127.0.0.1:1/metrics",
    )


def measured(triton: LiveTriton, model: str, **load: Any) -> Run:
    return bench(target(triton, model), Load.closed(2, requests=4, warmup=1, **load), PROMPTS)


def parts(model: str, *names: str) -> set[str]:
    return {model, *(f"{model}_{name}" for name in names)}


@pytest.mark.parametrize("stream", [True, False])
def test_a_sequence_brings_the_figures_of_all_that_answer_it(
    triton: LiveTriton, stream: bool
) -> None:
    model = triton.build("gpt2-onnx")
    found = measured(triton, model, stream=stream)
    assert summarize(found).errors == {}
    assert {(one.input_tokens, one.output_tokens) for one in found.records} == {(12, 6)}
    assert (summarize(found).ttft is not None) == stream
    assert found.server is not None
    # The generator is no step of the ensemble: the session asks it.
    figures = {one.model: one for one in found.server.models}
    assert figures.keys() == parts(model, "preprocess", "session", "postprocess", "generator")
    assert figures[f"{model}_generator"].inferences >= 4 * 6
    assert found.server.stand_ins == {f"{model}_generator": ONNX}


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_ensemble_is_measured_with_its_parts(triton: LiveTriton, decoupled: bool) -> None:
    # As the plugin's own tests build them, so that the server has them once.
    asked: dict[str, Any] = {"engine": str(ENGINE), **({"decoupled": True} if decoupled else {})}
    model = triton.build("trtllm", **asked)
    found = measured(triton, model, stream=decoupled)
    assert summarize(found).errors == {}
    assert {(one.input_tokens, one.output_tokens) for one in found.records} == {(12, 6)}
    assert found.server is not None
    asks = ["tensorrt_llm_bls"] if decoupled else ["preprocessing", "postprocessing"]
    assert {one.model for one in found.server.models} == parts(model, "tensorrt_llm", *asks)
    assert found.server.models[0].requests == 4
    assert found.server.stand_ins == {f"{model}_tensorrt_llm": TENSORRT}
    # It took all of the time, of which its steps tell only what they computed.
    told = {row.label: row.value for row in rows(found)}
    waited = sum(one.done - one.sent for one in found.records) / 4 * 1000
    assert 0.5 * waited < (told["Server: avg. in all (ms)"] or 0) < 1.5 * waited


def test_a_stand_in_is_known_without_metrics_too_and_nothing_else_is_one(
    triton: LiveTriton,
) -> None:
    engine, plain = triton.build("trtllm", engine=str(ENGINE)), triton.build("hf", max_batch_size=4)
    assert marked(target(triton, engine, metrics=False)).name == f"{engine} (stand-in)"
    assert marked(target(triton, engine)).name == f"{engine} (stand-in)"
    assert marked(target(triton, plain)).name == ""
    # Only its own process knows of the LLM API that it is not there.
    own = triton.build("trtllm", layout="llmapi", stand_in=True)
    assert marked(target(triton, own)).name == f"{own} (stand-in)"


@pytest.mark.parametrize("name", PAIRS)
def test_every_ready_made_pair_is_compared(triton: LiveTriton, name: str) -> None:
    pair = PAIRS[name]
    both = [parse_subject(text) for text in (pair.first, pair.second)]
    variants = with_defaults([one for one in both if isinstance(one, Built)], pair.defaults({}))
    targets = []
    for variant in variants:
        usual = {"batching": Registry.load().recipe(variant.plugin).batching}
        # What is the same by default is built by other tests too, and is there once.
        asked = {
            key: value == "true" or value
            for key, value in variant.settings.items()
            if usual.get(key) != value
        }
        targets.append(marked(target(triton, triton.build(variant.plugin, **asked))))
    infos = [one.info() for one in targets]
    load = Load.closed(2, requests=4, warmup=1, stream=all(i.exchange != "unary" for i in infos))
    found = compare(targets, infos, [load], PROMPTS, rounds=1)
    runs = [cell.runs[0] for cell in found.cells]
    for variant, made in zip(variants, runs, strict=True):
        assert summarize(made).errors == {}
        assert {(one.input_tokens, one.output_tokens) for one in made.records} == {(12, 6)}
        assert made.server is not None
        part = STOOD_IN.get(variant.plugin)
        assert set(made.server.stand_ins.values()) == ({part} if part else set())
        assert made.subject.name.endswith(" (stand-in)") == (part is not None)
    assert [record.input_tokens for record in runs[0].records] == [
        record.input_tokens for record in runs[1].records
    ]


def test_the_commands_say_it_in_every_form(triton: LiveTriton, tmp_path: Path) -> None:
    engine, plain = triton.build("trtllm", engine=str(ENGINE)), triton.build("hf", max_batch_size=4)
    done = run(
        "compare", plain, f"trt={engine}", "--url", triton.server.grpc_url,
        "--repository", str(triton.repository), "--rounds", "1", "--requests", "3",
        "--concurrency", "1", "--output-tokens", "4", "--json", str(tmp_path / "found.json"),
        "--report", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| trt (stand-in) |" in done.stdout
    assert f"{plain} (stand-in)" not in done.stdout
    note = f"trt (stand-in): llmserve's stand-in answered in place of {TENSORRT}"
    assert f"llmserve: {note}" in done.stderr
    assert note in (tmp_path / "report.md").read_text()
    assert "trt (stand-in)" in (tmp_path / "report.html").read_text()
    content = json.loads((tmp_path / "found.json").read_text())
    assert [subject["name"] for subject in content["subjects"]] == [plain, "trt (stand-in)"]
    of_plain, of_engine = (cell["runs"][0]["server"]["stand_ins"] for cell in content["cells"])
    assert (of_plain, of_engine) == ({}, {f"{engine}_tensorrt_llm": TENSORRT})
