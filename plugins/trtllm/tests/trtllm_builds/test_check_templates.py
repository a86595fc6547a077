"""`llmserve check` on repositories that were made by hand from TensorRT-LLM's templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.repository.check import Problem, check_repository

ENGINE = """
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 64
model_transaction_policy { decoupled: True }
input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
input { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } }
input { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] }
input { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
output { name: "batch_index" data_type: TYPE_INT32 dims: [ 1 ] }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
parameters { key: "gpt_model_path" value: { string_value: "ENGINE" } }
parameters { key: "batch_scheduler_policy" value: { string_value: "max_utilization" } }
"""
PREPROCESSING = """
name: "preprocessing"
backend: "python"
max_batch_size: 64
input { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "INPUT_ID" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "REQUEST_INPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ -1 ] }
parameters { key: "tokenizer_dir" value: { string_value: "/models/llama" } }
"""
POSTPROCESSING = """
name: "postprocessing"
backend: "python"
max_batch_size: 64
input { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [ -1, -1 ] }
input { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
output { name: "OUTPUT" data_type: TYPE_STRING dims: [ -1 ] }
parameters { key: "tokenizer_dir" value: { string_value: "/models/llama" } }
"""
ENSEMBLE = """
name: "ensemble"
platform: "ensemble"
max_batch_size: 64
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "preprocessing"
    model_version: -1
    input_map { key: "QUERY" value: "text_input" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
    output_map { key: "INPUT_ID" value: "_INPUT_ID" }
    output_map { key: "REQUEST_INPUT_LEN" value: "_REQUEST_INPUT_LEN" }
    output_map { key: "REQUEST_OUTPUT_LEN" value: "_REQUEST_OUTPUT_LEN" }
  }
  step {
    model_name: "tensorrt_llm"
    model_version: -1
    input_map { key: "input_ids" value: "_INPUT_ID" }
    input_map { key: "input_lengths" value: "_REQUEST_INPUT_LEN" }
    input_map { key: "request_output_len" value: "_REQUEST_OUTPUT_LEN" }
    input_map { key: "streaming" value: "stream" }
    output_map { key: "output_ids" value: "_TOKENS_BATCH" }
  }
  step {
    model_name: "postprocessing"
    model_version: -1
    input_map { key: "TOKENS_BATCH" value: "_TOKENS_BATCH" }
    output_map { key: "OUTPUT" value: "text_output" }
  }
}
"""
BLS = """
name: "tensorrt_llm_bls"
backend: "python"
max_batch_size: 64
model_transaction_policy { decoupled: True }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
parameters { key: "tensorrt_llm_model_name" value: { string_value: "tensorrt_llm" } }
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Lend a repository of five models that is right, with an engine that fits."""
    engine = tmp_path / "engine"
    engine.mkdir()
    write_engine(engine, version="0.12.0")
    repository = tmp_path / "repo"
    for text in (ENGINE, PREPROCESSING, POSTPROCESSING, ENSEMBLE, BLS):
        name = text.split('"')[1]
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text.replace("ENGINE", str(engine)))
        if "python" in text:
            (repository / name / "1" / "model.py").write_text("")
    assert check_repository(repository) == []
    return repository


def write_engine(folder: Path, *, version: str, packed: bool = True) -> None:
    plugins = {"remove_input_padding": packed, "paged_kv_cache": True}
    build = {"max_batch_size": 64, "plugin_config": plugins}
    (folder / "config.json").write_text(json.dumps({"version": version, "build_config": build}))


def found(repo: Path, model: str, old: str, new: str) -> list[Problem]:
    path = repo / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return [problem for problem in check_repository(repo) if problem.model == model]


def test_a_placeholder_in_a_number_is_told_with_its_line(repo: Path) -> None:
    size = "max_batch_size: 64"
    problems = found(repo, "tensorrt_llm", size, "max_batch_size: ${triton_max_batch_size}")
    assert "${triton_max_batch_size} in line 4" in problems[0].what
    assert problems[0].fatal


@pytest.mark.parametrize(
    ("model", "value", "placeholder"),
    [
        ("tensorrt_llm", "inflight_fused_batching", "${batching_strategy}"),
        ("preprocessing", "/models/llama", "${tokenizer_dir}"),
    ],
)
def test_a_placeholder_that_a_model_cannot_do_without(
    repo: Path, model: str, value: str, placeholder: str
) -> None:
    """What the tutorial's sed leaves, as it looks for text that later templates do not have."""
    problems = found(repo, model, value, placeholder)
    assert any(p.fatal and f"is still {placeholder}" in p.what for p in problems)


def test_a_placeholder_that_means_unset_is_worth_a_line(repo: Path) -> None:
    problems = found(repo, "tensorrt_llm", "max_utilization", "${batch_scheduler_policy}")
    assert [(p.what, p.fatal) for p in problems] == [
        ("${batch_scheduler_policy} in line 14 is not filled in", False)
    ]


def test_a_word_that_no_version_knows(repo: Path) -> None:
    problems = found(repo, "tensorrt_llm", "max_utilization", "guaranteed_completion")
    assert "no version of TensorRT-LLM knows 'guaranteed_completion'" in problems[0].what
    assert "guaranteed_no_evict" in problems[0].mend


def test_a_word_that_was_dropped(repo: Path) -> None:
    line = 'parameters { key: "max_num_sequences" value: { string_value: "64" } }\n'
    problems = found(repo, "tensorrt_llm", "parameters", line + "parameters")
    assert problems[0].what == "max_num_sequences has not been read since 0.8"


def test_an_engine_of_another_version(repo: Path) -> None:
    write_engine(repo.parent / "engine", version="0.9.0")
    problems = check_repository(repo)
    assert "template is of TensorRT-LLM 0.11 or later and its engine of 0.9.0" in problems[0].what


def test_an_old_template_with_a_new_engine(repo: Path) -> None:
    old = 'name: "request_output_len" data_type: TYPE_INT32'
    new = 'name: "request_output_len" data_type: TYPE_UINT32'
    problems = found(repo, "tensorrt_llm", old, new)
    assert "before 0.7 and its engine of 0.12.0" in problems[0].what


def test_an_engine_that_is_not_there(repo: Path) -> None:
    problems = found(repo, "tensorrt_llm", "/engine", "/nowhere")
    assert "there is no engine at" in problems[0].what
    assert not problems[0].fatal


def test_an_engine_that_cannot_be_batched_in_flight(repo: Path) -> None:
    write_engine(repo.parent / "engine", version="0.12.0", packed=False)
    assert "packed input" in check_repository(repo)[0].what


def test_a_batch_over_the_engines(repo: Path) -> None:
    problems = found(repo, "tensorrt_llm", "max_batch_size: 64", "max_batch_size: 128")
    assert "max_batch_size 128 is over the engine's 64" in problems[0].what


def test_the_type_of_max_tokens(repo: Path) -> None:
    old, new = '"max_tokens" data_type: TYPE_INT32', '"max_tokens" data_type: TYPE_UINT32'
    problems = found(repo, "ensemble", old, new)
    assert "max_tokens is UINT32 and preprocessing's REQUEST_OUTPUT_LEN INT32" in problems[0].what


def test_streaming_from_an_engine_that_answers_in_one_piece(repo: Path) -> None:
    found(repo, "tensorrt_llm", "decoupled: True", "decoupled: False")
    told = {problem.model: problem.what for problem in check_repository(repo)}
    assert "tensorrt_llm is not decoupled" in told["ensemble"]
    assert told["tensorrt_llm_bls"] == "it is decoupled and tensorrt_llm is not decoupled"


def test_a_step_that_gets_tensors_from_a_decoupled_model_and_from_another(repo: Path) -> None:
    old = 'input_map { key: "TOKENS_BATCH" value: "_TOKENS_BATCH" }'
    new = old + '\n    input_map { key: "LENGTH" value: "_REQUEST_INPUT_LEN" }'
    problems = found(repo, "ensemble", old, new)
    assert "which Triton refuses" in problems[0].what
