"""What a report says about the engine, read from a repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llmserve
from llmserve_bench.engines import engine_of
from llmserve_bench.output import conditions_of
from llmserve_bench.results import Subject
from llmserve_bench.targets import Target

from .examples import make_comparison


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    llmserve.build("hf", "demo", output=folder, name="whole", dtype="bfloat16")
    llmserve.build("trtllm", "demo", output=folder, name="parts", layout="llmapi", stand_in=True)
    return folder


def test_a_model_names_its_engine_and_the_types_it_computes_and_stores(repository: Path) -> None:
    engine = engine_of(repository, "whole")
    assert engine.startswith("transformers (")
    assert "dtype bfloat16" in engine
    assert "weights F16" in engine
    assert "path" not in engine
    # An ensemble's engine is in one of its parts.
    assert engine_of(repository, "parts").startswith("tensorrt_llm")
    assert engine_of(repository, "missing") == ""


def test_only_a_triton_is_described_by_the_repository(repository: Path) -> None:
    target = Target("whole", "127.0.0.1:9", repository=repository)
    assert "dtype bfloat16" in target.subject.engine
    assert replace(target, api="chat").subject.engine == ""
    assert replace(target, repository=None).subject.engine == ""


def test_damaged_weights_have_no_type(repository: Path, tmp_path: Path) -> None:
    llmserve.build("hf", "demo", output=tmp_path)
    (weights,) = (tmp_path / "demo").rglob("*.safetensors")
    for content in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x03" + b"\0" * 7 + b"xxx"):
        weights.unlink()
        weights.write_bytes(content)
        assert "weights" not in engine_of(tmp_path, "demo")
    for offsets in ("7", "[0]", '["a", "b"]', "null"):
        header = f'{{"w": {{"dtype": "F16", "data_offsets": {offsets}}}}}'.encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        assert "weights" not in engine_of(tmp_path, "demo")


def test_the_conditions_of_a_report_name_the_engines() -> None:
    result = make_comparison()
    cases = tuple(
        replace(case, subject=replace(case.subject, engine="stepwise (dtype float32)"))
        for case in result.cases
    )
    named = conditions_of(replace(result, cases=cases))["Engines"]
    assert named.count("stepwise (dtype float32)") == len({c.subject.name for c in cases})
    assert "Engines" not in conditions_of(result)
    assert Subject("a", "b", "c").engine == ""
