"""How the models are wired in each way of serving, and that nothing of it would not load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.errors import IncompatibleError, LLMServeError, OptionError
from llmserve.repository.check import check_repository

from .building import ENGINES, build, engine_of

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("0.5.0", {"batching": "static"}),
    ("0.12.0", {"decoupled": False, "bls": True}),
    ("0.12.0", {}),
    ("1.2.1", {}),
    ("1.2.1", {"stream_through": "ensemble", "bls": True}),
    ("1.2.1", {"decoupled": False, "prompt_embedding_table_data_type": "TYPE_BF16"}),
    ("1.2.1", {"prompt_embedding_table_data_type": "TYPE_FP32"}),
    ("1.2.1", {"layout": "llmapi"}),
    ("1.2.1", {"layout": "llmapi", "batching": "static", "decoupled": True}),
]


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_what_is_built_would_load(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    build(tmp_path, version, **options)
    assert check_repository(tmp_path / version) == []


def steps(configs: dict[str, Any]) -> dict[str, Any]:
    return {step.model_name: step for step in configs["ensemble"].ensemble_scheduling.step}


def test_a_stream_leads_to_the_model_that_remembers(tmp_path: Path) -> None:
    configs = build(tmp_path, "1.2.1", decoupled=True)
    assert list(steps(configs)) == ["tensorrt_llm_bls"]
    assert configs["tensorrt_llm"].model_transaction_policy.decoupled
    assert configs["tensorrt_llm_bls"].model_transaction_policy.decoupled
    exchange = configs["ensemble"].parameters["llmserve.exchange"].string_value
    assert exchange == "stream"


def test_nvidias_wiring_leads_nothing_by_a_decoupled_engine(tmp_path: Path) -> None:
    configs = build(tmp_path, "1.2.1", decoupled=True, stream_through="ensemble")
    wired = steps(configs)
    assert list(wired) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    made = set(wired["tensorrt_llm"].output_map.values())
    assert set(wired["postprocessing"].input_map.values()) <= made
    # By way of preprocessing, which reads it from request parameters too.
    assert wired["preprocessing"].output_map["OUT_STREAM"] == "_OUT_STREAM"
    assert wired["tensorrt_llm"].input_map["streaming"] == "_OUT_STREAM"
    assert "finish_reason" not in {tensor.name for tensor in configs["ensemble"].output}


@pytest.mark.parametrize(("version", "streams"), [("0.5.0", False), ("0.12.0", True)])
def test_in_flight_batching_streams_unless_told_otherwise(
    tmp_path: Path, version: str, streams: bool
) -> None:
    engine = build(tmp_path, version)["tensorrt_llm"]
    assert engine.model_transaction_policy.decoupled == streams
    unary = build(tmp_path / "unary", version, decoupled=False)["tensorrt_llm"]
    assert not unary.model_transaction_policy.decoupled
    static = build(tmp_path / "static", version, batching="static")["tensorrt_llm"]
    assert not static.model_transaction_policy.decoupled


def test_a_stream_is_answered_by_as_many_copies_as_were_asked_for(tmp_path: Path) -> None:
    configs = build(tmp_path, "1.2.1", bls_instance_count=6)
    assert [group.count for group in configs["tensorrt_llm_bls"].instance_group] == [6]


def test_parts_are_called_after_the_build_unless_it_is_nvidias(tmp_path: Path) -> None:
    engine = str(ENGINES / "1.2")
    llmserve.build("trtllm", "demo", output=tmp_path, engine=engine, decoupled=False)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "demo", "demo_preprocessing", "demo_tensorrt_llm", "demo_postprocessing",
    }  # fmt: skip


def test_the_container_is_that_of_the_version(tmp_path: Path) -> None:
    build(tmp_path, "0.12.0")
    for folder in (tmp_path / "0.12.0", tmp_path / "0.12.0" / "ensemble"):
        text = (folder / "Dockerfile").read_text()
        assert "FROM nvcr.io/nvidia/tritonserver:24.08-trtllm-python-py3" in text
        assert "--no-deps" in text
        assert "llmserve-trtllm==" in text
        assert "pluggy==" in text
        assert "transformers==" not in text


def test_a_version_of_which_no_container_is_known_gets_none_that_would_not_do(
    tmp_path: Path,
) -> None:
    # 25.11 has 1.0.3; of what is older than 1.0 and newer than 0.21 there is none.
    engine = engine_of(tmp_path / "engine", "0.22.0")
    build(tmp_path, "0.22.0", engine=str(engine))
    text = (tmp_path / "0.22.0" / "Dockerfile").read_text()
    assert "FROM ${IMAGE}" in text
    assert "transformers==" not in text


def test_an_engine_of_several_processes_is_started_by_its_script_there(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(ENGINES / "1.2", engine)
    content = json.loads((engine / "config.json").read_text())
    content["pretrained_config"]["mapping"] = {"tp_size": 2, "pp_size": 1}
    (engine / "config.json").write_text(json.dumps(content))
    build(tmp_path, "1.2.1", engine=str(engine))
    text = (tmp_path / "1.2.1" / "ensemble" / "Dockerfile").read_text()
    assert 'CMD ["sh", \\\n     "/models/ensemble/launch.sh"' in text


def test_the_models_in_pytorch_lie_in_the_same_repository(tmp_path: Path) -> None:
    build(tmp_path, "0.5.0", batching="static")
    llmserve.build("hf", "demo", name="llama_python", output=tmp_path / "0.5.0")
    assert check_repository(tmp_path / "0.5.0") == []


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("0.5.0", {"decoupled": True}, "sends of a stream is not in the table"),
        ("0.5.0", {"bls": True}, "has no tensorrt_llm_bls"),
        ("0.5.0", {"layout": "llmapi"}, "layout=engine"),
        ("1.2.1", {"batching": "static"}, "layout=llmapi for static batches"),
        ("1.2.1", {"layout": "llmapi", "engine_at": "/engine"}, "leave out --engine-at"),
        ("0.12.0", {"engine": str(ENGINES / "0.19")}, r"0\.19\.0, and this is for 0\.12\.0"),
        ("1.2.1", {"layout": "llmapi", "cuda_graph_mode": True}, "leave out --cuda-graph-mode"),
        ("1.2.1", {"quantization": "fp8"}, "this one is there already: leave out --quantization"),
        ("1.2.1", {"stand_in": True}, "leave out --stand-in"),
        ("0.5.0", {"max_queue_size": 8}, r"0\.5\.0 has no max_queue_size.*from 0\.12 on"),
        ("0.12.0", {"logits_datatype": "TYPE_FP16"}, r"from 0\.17 on"),
        ("0.5.0", {"enable_chunked_context": True}, r"has no enable_chunked_context.*0\.12"),
        ("0.12.0", {"cuda_graph_mode": True}, r"0\.12\.0 has no cuda_graph_mode.*from 0\.15"),
        ("1.2.1", {"max_num_sequences": 4}, r"and before 0\.8"),
        ("0.19.0", {"enable_trt_overlap": True}, r"from 0\.5 on and before 0\.11 or from 1\.2 on"),
        ("0.5.0", {"exclude_input_in_output": False}, "0.5.0 has no exclude_input_in_output"),
        ("0.12.0", {"decoding_mode": "eagle"}, "has no decoding_mode eagle"),
        ("1.2.1", {"container": "24.08"}, r"1\.2\.1 was asked for, and container 24\.08 has"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, version: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncompatibleError, match=message) as caught:
        build(tmp_path, version, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / version).exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(ENGINES / "1.2", engine)
    content = json.loads((engine / "config.json").read_text())
    content["pretrained_config"]["vocab_size"] = 512
    (engine / "config.json").write_text(json.dumps(content))
    with pytest.raises(LLMServeError, match=r"ids up to \d+, and the engine.*vocabulary of 512"):
        build(tmp_path, "1.2.1", engine=str(engine))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_cache_free_gpu_mem_fracton": 0.9}, "did you mean 'kv_cache_free_gpu_mem_fraction'"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "at most 1"),
        ({"kv_cache_free_gpu_mem_fraction": "much"}, "takes a number"),
        ({"max_tokens_in_paged_kv_cache": -1}, "at least 0"),
        ({"enable_kv_cache_reuse": "yes"}, "true or false"),
        ({"decoding_mode": "topk"}, "choose one of"),
        ({"scheduler": "fastest"}, "choose one of guaranteed_no_evict"),
        ({"container": "99.01"}, "not known which TensorRT-LLM"),
        ({"engine": ""}, "no engine to serve"),
        ({"logits_datatype": "TYPE_BF16"}, "choose one of TYPE_FP32, TYPE_FP16"),
    ],
)
def test_options_are_checked_for_name_type_and_range(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        build(tmp_path, "1.2.1", **asked)
    assert "\n" not in str(caught.value)
