"""What is emitted, field by field through the protobuf, against the templates' tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.modelconfig import ModelConfig

from .building import VERSIONS, build
from .tables import Tensor, read

# Of encoder-decoder and multimodal models, which this plugin does not serve.
NOT_TEXT = {
    "DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES", "PROMPT_TABLE_EXTRA_ID",
    "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN", "OUT_PROMPT_TABLE_EXTRA_IDS", "PIXEL_VALUES",
    "ASPECT_RATIO_IDS", "ASPECT_RATIO_MASK", "CROSS_ATTENTION_MASK", "IMAGE_SIZES",
    "IS_VIDEO_INPUT", "ATTENTION_MASK", "IMAGE_GRID_THW", "VISION_INPUT_ID",
    "decoder_text_input", "prompt_table_extra_id", "image_input", "image_bytes_input",
    "image_url_input", "video_bytes_input",
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
}  # fmt: skip
PLACEHOLDERS = {
    "${logits_datatype}": "FP32",
    "${encoder_input_features_data_type}": "FP16",
    "${prompt_embedding_table_data_type}": "FP16",
}


def declared(fields: Any) -> dict[str, Any]:
    found = {
        field.name: Tensor(
            pb.DataType.Name(field.data_type).removeprefix("TYPE_"),
            tuple(field.dims),
            getattr(field, "optional", False),
            field.HasField("reshape") and not field.reshape.shape,
            getattr(field, "allow_ragged_batch", False),
        )
        for field in fields
    }
    assert len(found) == len(fields), "a tensor is declared twice"
    return found


def expected(side: dict[str, Any], *, inputs: bool = True) -> dict[str, Tensor]:
    return {
        name: Tensor(
            PLACEHOLDERS.get(tensor.kind, tensor.kind),
            tensor.dims,
            tensor.optional or (inputs and name in MADE_OPTIONAL),
            tensor.reshape,
            tensor.ragged,
        )
        for name, tensor in side.items()
        if name not in NOT_TEXT
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_engines_model_has_exactly_the_tensors_of_its_version(
    tmp_path: Path, version: str
) -> None:
    table = read(version)["tensorrt_llm"]
    config = build(tmp_path, version)["tensorrt_llm"]
    assert declared(config.input) == expected(table.inputs)
    assert declared(config.output) == expected(table.outputs, inputs=False)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", ["ensemble", "preprocessing", "postprocessing"])
def test_the_models_around_it_have_the_tensors_of_their_version(
    tmp_path: Path, version: str, model: str
) -> None:
    """All that the templates have of text, in the same form; ours come in addition."""
    table = read(version)[model]
    config = build(tmp_path, version)[model]
    for fields, wanted in (
        (config.input, expected(table.inputs)),
        (config.output, expected(table.outputs, inputs=False)),
    ):
        found = declared(fields)
        assert {name: found.get(name) for name in wanted} == wanted
        if model == "ensemble":
            assert found.keys() - wanted.keys() <= OURS


def wires(config: ModelConfig) -> dict[str, Any]:
    return {step.model_name: step for step in config.ensemble_scheduling.step}


RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_wish_of_the_client_reaches_the_engine_under_its_name(
    tmp_path: Path, version: str
) -> None:
    """Straight, or by way of preprocessing, which checks it and reads request parameters too."""
    table = read(version)
    steps = wires(build(tmp_path, version)["ensemble"])
    into, engine = steps["preprocessing"], steps["tensorrt_llm"]
    has = table["tensorrt_llm"].inputs
    followed = 0
    for name in table["ensemble"].inputs.keys() - NOT_TEXT - {"stream", "exclude_input_in_output"}:
        inside = RENAMED.get(name, name)
        if inside not in has:
            continue
        wire = engine.input_map[inside]
        if wire != name:
            assert into.output_map[f"OUT_{name.upper()}"] == wire
            assert name in into.input_map.values()
        followed += 1
    assert followed >= 10


@pytest.mark.parametrize("version", VERSIONS)
def test_the_dataflow_is_that_of_the_template(tmp_path: Path, version: str) -> None:
    steps = wires(build(tmp_path, version)["ensemble"])
    assert list(steps) == ["preprocessing", "tensorrt_llm", "postprocessing"]
    read, engine, write = steps.values()
    assert read.input_map["QUERY"] == "text_input"
    assert read.input_map["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert read.output_map["INPUT_ID"] == engine.input_map["input_ids"] == "_INPUT_ID"
    assert engine.input_map["input_lengths"] == "_REQUEST_INPUT_LEN"
    assert engine.input_map["request_output_len"] == "_REQUEST_OUTPUT_LEN"
    assert engine.output_map["output_ids"] == write.input_map["TOKENS_BATCH"] == "_TOKENS_BATCH"
    assert write.output_map["OUTPUT"] == "text_output"
    if version == "0.5.0":
        # Its engine takes no words, and says no lengths.
        assert not {"stop_words_list", "bad_words_list"} & engine.input_map.keys()
        assert "SEQUENCE_LENGTH" not in write.input_map
        return
    assert engine.input_map["stop_words_list"] == "_STOP_WORDS_IDS"
    assert engine.input_map["bad_words_list"] == "_BAD_WORDS_IDS"
    assert engine.input_map["embedding_bias"] == "_EMBEDDING_BIAS"
    assert engine.input_map["end_id"] == "_PREPROCESSOR_END_ID"
    assert engine.input_map["pad_id"] == "_PREPROCESSOR_PAD_ID"
    assert write.input_map["SEQUENCE_LENGTH"] == "_SEQUENCE_LENGTH"


@pytest.mark.parametrize("version", VERSIONS)
def test_scheduling_blocks_are_those_of_the_template(tmp_path: Path, version: str) -> None:
    asked = {} if version == "0.5.0" else {"max_queue_delay_microseconds": 50}
    config = build(tmp_path, version, **asked)["tensorrt_llm"]
    assert config.backend == "tensorrtllm"
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]
    assert not config.model_transaction_policy.decoupled
    if version == "0.5.0":
        assert not config.HasField("dynamic_batching")
        return
    assert config.dynamic_batching.preferred_batch_size == [config.max_batch_size]
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 0
