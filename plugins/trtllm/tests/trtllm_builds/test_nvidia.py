"""What is emitted, field by field, against what NVIDIA's files of each version have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.errors import IncompatibleError
from llmserve.plugin import ModelConfig
from llmserve_trtllm.options import PARAMETERS
from llmserve_trtllm.versions import Version

from .building import build
from .nvidia import Tensor, releases

RELEASES = {name: release for name, release in releases().items() if name != "llmapi"}
VERSIONS = tuple(RELEASES)
LATER = VERSIONS[1:]
# Not read from NVIDIA's files: between 0.19.0 and 1.2.1.
UNREAD = ("0.20.0", "0.21.0", "1.0.0", "1.1.0")
WAYS: list[tuple[str, dict[str, Any]]] = [
    *((version, {"decoupled": False}) for version in VERSIONS),
    *((version, {}) for version in LATER),
    *((version, {"stream_through": "ensemble"}) for version in LATER),
    *((version, {"batching": "static"}) for version in VERSIONS[:-1]),
]
# Of encoder-decoder and multimodal models, which this plugin does not serve, and how scores went
# through postprocessing before 0.14: here they go by it.
NOT_TEXT = {
    "DECODER_QUERY", "IMAGE", "IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES", "PIXEL_VALUES",
    "PROMPT_TABLE_EXTRA_ID", "PROMPT_EMBEDDING_TABLE", "OUT_PROMPT_EMBEDDING_TABLE",
    "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN", "OUT_PROMPT_TABLE_EXTRA_IDS",
    "ASPECT_RATIO_IDS", "ASPECT_RATIO_MASK", "CROSS_ATTENTION_MASK", "IMAGE_SIZES",
    "IS_VIDEO_INPUT", "ATTENTION_MASK", "IMAGE_GRID_THW", "VISION_INPUT_ID",
    "decoder_text_input", "prompt_table_extra_id", "image_input", "image_bytes_input",
    "image_url_input", "video_bytes_input", "num_draft_tokens", "use_draft_logits",
    "CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX",
    "OUT_CUM_LOG_PROBS", "OUT_OUTPUT_LOG_PROBS", "OUT_CONTEXT_LOGITS", "OUT_GENERATION_LOGITS",
    "OUT_BATCH_INDEX",
}  # fmt: skip
# Required by the templates, and not by ours: a request that does not say gets a default.
MADE_OPTIONAL = {
    "max_tokens", "bad_words", "stop_words",
    "REQUEST_OUTPUT_LEN", "BAD_WORDS_DICT", "STOP_WORDS_DICT",
}  # fmt: skip
# What every model of llmserve takes and gives beside the templates' tensors.
OURS = {
    "messages", "ignore_eos", "exclude_input_in_output", "return_num_input_tokens",
    "return_num_output_tokens", "stream",
    "finish_reason", "num_input_tokens", "num_output_tokens",
    # Names of other versions, which clients send all the same.
    "min_tokens", "min_length", "seed", "random_seed",
}  # fmt: skip
PLACEHOLDERS = {
    "logits_datatype": "FP32",
    "encoder_input_features_data_type": "FP16",
    "prompt_embedding_table_data_type": "FP16",
}
# Ours, and what the backend's template has for Triton and for the workers.
NOT_READ = {"FORCE_CPU_ONLY_INPUT_TENSORS"}


def declared(fields: Any) -> dict[str, Tensor]:
    found = {
        field.name: Tensor(
            pb.DataType.Name(field.data_type).removeprefix("TYPE_"),
            tuple(field.dims),
            getattr(field, "optional", False),
            getattr(field, "allow_ragged_batch", False),
            field.HasField("reshape") and not field.reshape.shape,
        )
        for field in fields
    }
    assert len(found) == len(fields), "a tensor is declared twice"
    return found


def expected(version: str, model: str, side: str) -> dict[str, Tensor]:
    return {
        name: Tensor(
            PLACEHOLDERS.get(tensor.kind, tensor.kind),
            tensor.dims,
            tensor.optional or (side == "input" and name in MADE_OPTIONAL),
            tensor.ragged,
            tensor.reshape,
        )
        for name, tensor in RELEASES[version].side(model, side).items()
        if name not in NOT_TEXT
    }


def parameters(config: ModelConfig) -> dict[str, str]:
    found = {key: value.string_value for key, value in config.parameters.items()}
    return {key: value for key, value in found.items() if not key.startswith("llmserve.")}


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_the_engine_would_load(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    """It has every parameter that is read without a default, and none that nobody reads."""
    release = RELEASES[version]
    config = build(tmp_path, version, **options)["tensorrt_llm"]
    found = parameters(config)
    assert not release.required.keys() - found.keys()
    assert found.keys() - NOT_READ <= release.required.keys() | release.read
    assert not any("${" in value for value in found.values())
    assert declared(config.input) == expected(version, "tensorrt_llm", "input")
    assert declared(config.output) == expected(version, "tensorrt_llm", "output")


@pytest.mark.parametrize("version", UNREAD)
def test_a_release_between_has_what_both_of_its_neighbours_require(
    tmp_path: Path, version: str
) -> None:
    found = parameters(build(tmp_path, version)["tensorrt_llm"])
    for known in ("0.19.0", "1.2.1"):
        assert not RELEASES[known].required.keys() - found.keys()
        assert found.keys() - NOT_READ <= RELEASES[known].required.keys() | RELEASES[known].read
    names = {tensor.name for tensor in build(tmp_path, version)["tensorrt_llm"].input}
    assert "seed" in names
    assert "random_seed" not in names
    # It is not known which release renamed this one.
    assert {"min_tokens", "min_length"} <= names


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_clients_find_the_tensors_of_their_version(
    tmp_path: Path, version: str, options: dict[str, Any]
) -> None:
    """All that the templates have of text, in the same form; ours come in addition."""
    configs = build(tmp_path, version, **options)
    for model in ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm_bls"):
        if model not in configs:
            continue
        source = "ensemble" if model == "tensorrt_llm_bls" else model
        for side in ("input", "output"):
            wanted = expected(version, source, side)
            found = declared(getattr(configs[model], side))
            assert {name: found.get(name) for name in wanted} == wanted
            if source == "ensemble":
                assert found.keys() - wanted.keys() <= OURS
    # A BLS model's template has no tensor that ours lacks.
    if "tensorrt_llm_bls" in configs:
        inputs = declared(configs["tensorrt_llm_bls"].input)
        assert expected(version, "tensorrt_llm_bls", "input").keys() <= inputs.keys()


def test_nvidias_names_for_the_llm_api_are_taken_too(tmp_path: Path) -> None:
    wanted = releases()["llmapi"].side("tensorrt_llm", "input")
    for options in ({}, {"decoupled": False}):
        configs = build(tmp_path, "1.2.1", layout="llmapi", **options)
        found = declared(configs["ensemble"].input)
        lacking = {name for name, tensor in wanted.items() if found.get(name) != tensor}
        # One prompt a row here, and one answer to it.
        assert lacking == {
            "text_input", "sampling_param_best_of", "sampling_param_return_perf_metrics",
        }  # fmt: skip


def steps(config: ModelConfig) -> dict[str, Any]:
    return {step.model_name: step for step in config.ensemble_scheduling.step}


RENAMED = {
    "top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty",
    "stream": "streaming",
}  # fmt: skip


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_what_a_client_asks_for_reaches_the_engine_under_its_name(
    tmp_path: Path, version: str, options: dict[str, Any]
) -> None:
    """Straight, or by way of preprocessing, which checks it and reads request parameters too."""
    wired = steps(build(tmp_path, version, **options)["ensemble"])
    if list(wired) == ["tensorrt_llm_bls"]:
        step = wired["tensorrt_llm_bls"]
        assert all(name == value for name, value in step.input_map.items())
        return
    into, engine, out = wired["preprocessing"], wired["tensorrt_llm"], wired["postprocessing"]
    has = expected(version, "tensorrt_llm", "input")
    followed = 0
    for name in expected(version, "ensemble", "input"):
        inside = RENAMED.get(name, name)
        if inside not in has or inside not in engine.input_map:
            # Whose answer comes in one piece says nothing of streams or of the prompt.
            assert (
                inside not in has or name in ("stream", "exclude_input_in_output") or name in OURS
            )
            continue
        wire = engine.input_map[inside]
        if wire != name:
            assert into.output_map[f"OUT_{name.upper()}"] == wire
            assert name in into.input_map.values()
        followed += 1
    assert followed >= 10
    assert into.input_map["QUERY"] == "text_input"
    assert into.input_map["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert into.output_map["INPUT_ID"] == engine.input_map["input_ids"] == "_INPUT_ID"
    assert engine.output_map["output_ids"] == out.input_map["TOKENS_BATCH"] == "_TOKENS_BATCH"
    assert out.output_map["OUTPUT"] == "text_output"
    if version == "0.5.0":
        # Its engine takes no words, and says no lengths.
        assert not {"stop_words_list", "bad_words_list"} & engine.input_map.keys()
        return
    assert engine.input_map["stop_words_list"] == "_STOP_WORDS_IDS"
    assert engine.input_map["bad_words_list"] == "_BAD_WORDS_IDS"
    assert engine.input_map["embedding_bias"] == "_EMBEDDING_BIAS"
    assert out.input_map["SEQUENCE_LENGTH"] == "_SEQUENCE_LENGTH"


@pytest.mark.parametrize("version", VERSIONS)
def test_scheduling_blocks_are_those_of_the_template(tmp_path: Path, version: str) -> None:
    asked = {} if version == "0.5.0" else {"max_queue_delay_microseconds": 50}
    config = build(tmp_path, version, **asked)["tensorrt_llm"]
    assert config.backend == "tensorrtllm"
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]
    if version == "0.5.0":
        assert not config.HasField("dynamic_batching")
        return
    assert config.dynamic_batching.preferred_batch_size == [config.max_batch_size]
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 0


# With what else they need, and what they may be where any text will not do.
TOGETHER = {
    "decoding_mode": "medusa",
    "xgrammar_tokenizer_info_path": "/x.json",
    "gpu_device_ids": "0",
}
GIVEN: dict[type, Any] = {bool: False, int: 7, float: 0.5, str: "1"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_parameter_that_a_version_reads_can_be_set_to_anything(
    tmp_path: Path, version: str
) -> None:
    """An explicit false among them: the backend's own default may be true."""
    asked = {
        p.option.name: TOGETHER.get(
            p.option.name, p.option.choices[0] if p.option.choices else GIVEN[p.option.kind]
        )
        for p in PARAMETERS
        if p.exists_in(Version.parse(version)) and p.option.name != "max_beam_width"
    }
    found = parameters(build(tmp_path, version, **asked)["tensorrt_llm"])
    for parameter in PARAMETERS:
        if parameter.option.name in asked:
            value = asked[parameter.option.name]
            text = str(value).lower() if isinstance(value, bool) else str(value)
            assert found[parameter.key(Version.parse(version))] == text
    # What is left is of encoder-decoder models, or has had no effect for long.
    assert RELEASES[version].read - found.keys() <= {
        "cross_kv_cache_fraction", "encoder_model_path", "enable_trt_overlap", "max_beam_width",
        "recv_poll_period_ms",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.5.0", "enable_trt_overlap"), ("0.19.0", "enable_kv_cache_reuse"),
     ("1.2.1", "enable_kv_cache_reuse"), ("1.2.1", "enable_trt_overlap"),
     ("0.13.0", "multi_block_mode")],
)  # fmt: skip
@pytest.mark.parametrize("value", [False, "false"])
def test_what_the_backend_does_by_default_can_be_turned_off(
    tmp_path: Path, version: str, name: str, value: object
) -> None:
    found = parameters(build(tmp_path, version, **{name: value})["tensorrt_llm"])
    key = "multiBlockMode" if version == "0.13.0" else name
    assert found[key] == "false"
    assert key not in parameters(build(tmp_path / "unset", version)["tensorrt_llm"])


@pytest.mark.parametrize("version", LATER)
def test_a_decoding_mode_is_one_that_the_version_knows(tmp_path: Path, version: str) -> None:
    lookahead = {"lookahead_window_size": 4, "lookahead_ngram_size": 3}
    option = next(p.option for p in PARAMETERS if p.option.name == "decoding_mode")
    for mode in option.choices:
        if mode == "lookahead" and version in ("0.19.0", "1.2.1"):
            more = {**lookahead, "lookahead_verification_set_size": 4}
        elif mode == "lookahead":
            # Without sizes it is refused, and before 0.19 there is no way to give them.
            continue
        else:
            more = {}
        if mode in RELEASES[version].modes:
            build(tmp_path / mode, version, decoding_mode=mode, **more)
        else:
            with pytest.raises(IncompatibleError, match=f"has no decoding_mode {mode}"):
                build(tmp_path / mode, version, decoding_mode=mode, **more)
