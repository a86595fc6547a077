"""Options: which there are, what they become, and what a version refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import IncompatibleError, OptionError
from llmserve_trtllm.parameters import PARAMETERS
from llmserve_trtllm.versions import Version

from .building import VERSIONS, build
from .tables import read

# What stands elsewhere than among the parameters, or has another name there.
ELSEWHERE = {
    "triton_backend", "triton_max_batch_size", "decoupled_mode", "max_queue_delay_microseconds",
    "max_queue_size", "logits_datatype", "encoder_input_features_data_type",
    "prompt_embedding_table_data_type",
}  # fmt: skip
NAMES = {"engine_dir": "gpt_model_path", "batching_strategy": "gpt_model_type"}
# Of encoder-decoder models, of the Python runtime that upstream offers beside the backend, and
# what has had no effect for long.
NOT_OURS = {"encoder_engine_dir", "cross_kv_cache_fraction", "tokenizer_dir", "enable_trt_overlap"}
FIXED = {"FORCE_CPU_ONLY_INPUT_TENSORS", "executor_worker_path"}
CHANGED: dict[type, Any] = {bool: lambda d: not d, int: lambda d: d + 1, float: lambda _: 0.5}


def another(parameter: Any) -> Any:
    option = parameter.option
    if isinstance(option.default, str):
        return next((choice for choice in option.choices if choice), "1")
    return CHANGED[type(option.default)](option.default)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_parameter_of_the_template_can_be_set(tmp_path: Path, version: str) -> None:
    asked = {
        p.option.name: another(p)
        for p in PARAMETERS
        if p.exists_in(Version.parse(version)) and p.option.name != "max_beam_width"
    }
    config = build(tmp_path, version, **asked)["tensorrt_llm"]
    found = {key for key in config.parameters if not key.startswith("llmserve.")} - FIXED
    wanted = {
        NAMES.get(name, name)
        for name in read(version)["tensorrt_llm"].parameters - ELSEWHERE - NOT_OURS
    }
    assert found | {"max_beam_width"} >= wanted
    # 0.5.0 has these with a value of its own in the template.
    assert found - wanted <= {"enable_trt_overlap", "gpt_model_type"}
    for name, value in asked.items():
        text = config.parameters[name].string_value
        assert text == (str(value).lower() if isinstance(value, bool) else str(value))


def test_what_keeps_its_default_is_left_to_the_backend(tmp_path: Path) -> None:
    config = build(tmp_path, "0.19.0")["tensorrt_llm"]
    assert "enable_chunked_context" not in config.parameters
    assert not any("${" in p.string_value for p in config.parameters.values())


@pytest.mark.parametrize(
    ("version", "asked", "message"),
    [
        (
            "0.5.0",
            {"enable_chunked_context": True},
            r"0\.5\.0 has no enable_chunked_context.*0\.12",
        ),
        ("0.12.0", {"cuda_graph_mode": True}, r"0\.12\.0 has no cuda_graph_mode.*from 0\.19"),
        ("1.2.1", {"max_num_sequences": 4}, r"only those before 0\.8"),
        ("1.2.1", {"enable_trt_overlap": True}, "no effect"),
        ("0.5.0", {"exclude_input_in_output": False}, "always returns the prompt"),
    ],
)
def test_what_a_version_lacks_is_refused_with_the_reason(
    tmp_path: Path, version: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncompatibleError, match=message) as caught:
        build(tmp_path, version, **asked)
    assert "\n" not in str(caught.value)


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
    ],
)
def test_options_are_checked_for_name_type_and_range(
    tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        build(tmp_path, "1.2.1", **asked)
    assert "\n" not in str(caught.value)
