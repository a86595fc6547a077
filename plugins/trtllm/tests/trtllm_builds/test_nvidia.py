"""Compares emitted configurations field by field with NVIDIA's files of each version."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.errors import IncompatibleError
from llmserve.plugin import ModelConfig
from llmserve_trtllm.options import PARAMETERS
from llmserve_trtllm.refusals import refuse
from llmserve_trtllm.versions import Version

from .building import DEFAULTS, cases, steps
from .conftest import Built
from .nvidia import Tensor, releases

RELEASES = {name: release for name, release in releases().items() if name != "llmapi"}
VERSIONS = tuple(RELEASES)
LATER = VERSIONS[1:]
# Releases between 0.19.0 and 1.2.1, of which NVIDIA's files have not been read.
UNREAD = ("0.20.0", "0.21.0", "1.0.0", "1.1.0")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((version, {"decoupled": False}) for version in VERSIONS),
    *((version, {}) for version in LATER),
    *((version, {"stream_through": "ensemble"}) for version in LATER),
    *((version, {"batching": "static"}) for version in VERSIONS[:-1]),
    ("0.5.0", {"decoupled": True}),
]
NOT_TEXT, MADE_OPTIONAL, OURS = (
    {word for line in cases(heading) for word in line[0].split()}
    for heading in ("not text", "made optional", "ours")
)
PLACEHOLDERS = {
    "logits_datatype": "FP32",
    "encoder_input_features_data_type": "FP16",
    "prompt_embedding_table_data_type": "FP16",
}
# Read by Triton, not by the backend.
NOT_READ = {"FORCE_CPU_ONLY_INPUT_TENSORS"}


def declared(fields: Any) -> dict[str, Tensor]:
    tensors = {
        field.name: Tensor(
            pb.DataType.Name(field.data_type).removeprefix("TYPE_"),
            tuple(field.dims),
            getattr(field, "optional", False),
            getattr(field, "allow_ragged_batch", False),
            field.HasField("reshape") and not field.reshape.shape,
        )
        for field in fields
    }
    assert len(tensors) == len(fields), "a tensor is declared twice"
    return tensors


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
    values = {key: value.string_value for key, value in config.parameters.items()}
    return {key: value for key, value in values.items() if not key.startswith("llmserve.")}


@pytest.mark.parametrize(("version", "options"), VARIANTS)
def test_the_engine_would_load(built: Built, version: str, options: dict[str, Any]) -> None:
    """It has every parameter that is read without a default, and none that is never read."""
    release = RELEASES[version]
    config = built(version, **options)["tensorrt_llm"]
    written = parameters(config)
    assert not release.required.keys() - written.keys()
    assert written.keys() - NOT_READ <= release.required.keys() | release.read
    assert not any("${" in value for value in written.values())
    assert declared(config.input) == expected(version, "tensorrt_llm", "input")
    assert declared(config.output) == expected(version, "tensorrt_llm", "output")


@pytest.mark.parametrize("version", UNREAD)
def test_an_unread_release_has_what_both_of_its_neighbours_require(
    built: Built, version: str
) -> None:
    engine = built(version)["tensorrt_llm"]
    written, names = parameters(engine), {tensor.name for tensor in engine.input}
    for neighbour in (RELEASES["0.19.0"], RELEASES["1.2.1"]):
        assert not neighbour.required.keys() - written.keys()
        assert written.keys() - NOT_READ <= neighbour.required.keys() | neighbour.read
    # It is not known which release renamed the lengths.
    assert {"seed", "min_tokens", "min_length"} <= names
    assert "random_seed" not in names


@pytest.mark.parametrize(("version", "options"), VARIANTS)
def test_clients_find_the_tensors_of_their_version(
    built: Built, version: str, options: dict[str, Any]
) -> None:
    """All tensors of the templates for text models, in the same form, in addition to ours."""
    configs = built(version, **options)
    for model in configs.keys() - {"tensorrt_llm"}:
        source = "ensemble" if model == "tensorrt_llm_bls" else model
        for side in ("input", "output"):
            templates = expected(version, source, side)
            tensors = declared(getattr(configs[model], side))
            assert {name: tensors.get(name) for name in templates} == templates
            if source == "ensemble":
                assert tensors.keys() - templates.keys() <= OURS
    # Our BLS model has every tensor of the template's.
    if "tensorrt_llm_bls" in configs:
        inputs = declared(configs["tensorrt_llm_bls"].input)
        assert expected(version, "tensorrt_llm_bls", "input").keys() <= inputs.keys()


@pytest.mark.parametrize("options", [{}, {"decoupled": False}])
def test_nvidias_llm_api_names_are_accepted_too(built: Built, options: dict[str, Any]) -> None:
    template = releases()["llmapi"].side("tensorrt_llm", "input")
    tensors = declared(built("1.2.1", layout="llmapi", **options)["ensemble"].input)
    missing = {name for name, tensor in template.items() if tensors.get(name) != tensor}
    # Here each row has one prompt and one answer.
    assert missing == {
        "text_input", "sampling_param_best_of", "sampling_param_return_perf_metrics",
    }  # fmt: skip


RENAMED = {
    "top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty",
    "stream": "streaming",
}  # fmt: skip
UNARY_ONLY = OURS | {"stream", "exclude_input_in_output"}
WIRES = {
    "input_ids": "_INPUT_ID", "stop_words_list": "_STOP_WORDS_IDS",
    "bad_words_list": "_BAD_WORDS_IDS", "embedding_bias": "_EMBEDDING_BIAS",
}  # fmt: skip


@pytest.mark.parametrize(("version", "options"), VARIANTS)
def test_a_clients_inputs_reach_the_engine_under_its_names(
    built: Built, version: str, options: dict[str, Any]
) -> None:
    """Directly, or through preprocessing, which checks them and also reads request parameters."""
    wired = steps(built(version, **options))
    if list(wired) == ["tensorrt_llm_bls"]:
        inputs = wired["tensorrt_llm_bls"].input_map
        assert all(name == value for name, value in inputs.items())
        return
    first, engine, last = wired["preprocessing"], wired["tensorrt_llm"], wired["postprocessing"]
    engine_inputs = expected(version, "tensorrt_llm", "input")
    connected = 0
    for name in expected(version, "ensemble", "input"):
        engine_name = RENAMED.get(name, name)
        if engine_name not in engine.input_map:
            # The engine would ignore a guide; it goes to preprocessing, which refuses it.
            # The engine of 0.5.0 would fail; preprocessing refuses it as well.
            is_refused = name.startswith("guided_decoding_") or name == "presence_penalty"
            assert engine_name not in engine_inputs or name in UNARY_ONLY or is_refused
            continue
        wire = engine.input_map[engine_name]
        if wire != name:
            assert first.output_map[f"OUT_{name.upper()}"] == wire
            assert name in first.input_map.values()
        connected += 1
    assert connected >= 10
    assert first.input_map["QUERY"] == "text_input"
    assert first.input_map["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert first.output_map["INPUT_ID"] == "_INPUT_ID"
    assert last.output_map["OUTPUT"] == "text_output"
    # The engine of 0.5.0 accepts no words and returns no lengths.
    wires = {name: wire for name, wire in WIRES.items() if name in engine_inputs}
    assert {name: engine.input_map[name] for name in wires} == wires
    engine_outputs = expected(version, "tensorrt_llm", "output")
    for output, name in (("output_ids", "TOKENS_BATCH"), ("sequence_length", "SEQUENCE_LENGTH")):
        assert (output in engine_outputs) == (name in last.input_map)
        if output in engine_outputs:
            assert engine.output_map[output] == last.input_map[name] == f"_{name}"


@pytest.mark.parametrize("version", VERSIONS)
def test_scheduling_blocks_are_those_of_the_template(built: Built, version: str) -> None:
    options = {} if version == "0.5.0" else {"max_queue_delay_microseconds": 50}
    config = built(version, **options)["tensorrt_llm"]
    assert config.backend == "tensorrtllm"
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]
    assert config.HasField("dynamic_batching") == (version != "0.5.0")
    if version != "0.5.0":
        assert config.dynamic_batching.preferred_batch_size == [config.max_batch_size]
        assert config.dynamic_batching.max_queue_delay_microseconds == 50
        assert config.dynamic_batching.default_queue_policy.max_queue_size == 0


# Values of parameters that do not accept every value, or that need a certain other parameter.
SPECIAL_VALUES = {
    "decoding_mode": "medusa",
    "xgrammar_tokenizer_info_path": "/x.json",
    "gpu_device_ids": "0",
}
VALUES: dict[type, Any] = {bool: False, int: 7, float: 0.5, str: "1"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_parameter_that_a_version_reads_can_be_set(built: Built, version: str) -> None:
    """An explicit false is written too: the backend's own default may be true."""
    release = Version.parse(version)
    settable = [p for p in PARAMETERS if p.exists_in(release) and p.name != "max_beam_width"]
    options = {
        p.name: SPECIAL_VALUES.get(p.name, (p.choices or (VALUES[p.kind or str],))[0])
        for p in settable
    }
    written = parameters(built(version, **options)["tensorrt_llm"])
    for parameter in settable:
        value = options[parameter.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert written[parameter.name] == text
    # The rest is for encoder-decoder models, or has had no effect for a long time.
    assert RELEASES[version].read - written.keys() <= {
        "cross_kv_cache_fraction", "encoder_model_path", "enable_trt_overlap", "max_beam_width",
        "recv_poll_period_ms",
    }  # fmt: skip
    # Flags that are not set are left to the version's default.
    flags = {p.name for p in settable if p.kind is bool and p.default == ""}
    assert not flags & parameters(built(version)["tensorrt_llm"]).keys()


@pytest.mark.parametrize("version", LATER)
def test_a_decoding_mode_is_one_that_the_version_supports(version: str) -> None:
    (option,) = (p for p in PARAMETERS if p.name == "decoding_mode")
    for mode in option.choices:
        options = {**DEFAULTS, "batching": "inflight", "decoding_mode": mode}
        if mode not in RELEASES[version].modes:
            message = f"has no decoding_mode {mode}"
        elif mode == "lookahead":
            message = "decoding_mode lookahead needs lookahead_window_size"
        else:
            refuse(options, Version.parse(version))
            continue
        with pytest.raises(IncompatibleError, match=message):
            refuse(options, Version.parse(version))
