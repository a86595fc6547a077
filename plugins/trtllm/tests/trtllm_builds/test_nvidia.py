"""What is emitted, field by field, against what NVIDIA's files of each version have."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.errors import IncompatibleError
from llmserve.plugin import ModelConfig
from llmserve_trtllm.options import PARAMETERS, refuse
from llmserve_trtllm.versions import Version

from .building import DEFAULTS, cases, steps
from .conftest import Built
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
NOT_TEXT, MADE_OPTIONAL, OURS = (
    {word for line in cases(heading) for word in line[0].split()}
    for heading in ("not text", "made optional", "ours")
)
PLACEHOLDERS = {
    "logits_datatype": "FP32",
    "encoder_input_features_data_type": "FP16",
    "prompt_embedding_table_data_type": "FP16",
}
# What the backend's template has for Triton.
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
def test_the_engine_would_load(built: Built, version: str, options: dict[str, Any]) -> None:
    """It has every parameter that is read without a default, and none that nobody reads."""
    release = RELEASES[version]
    config = built(version, **options)["tensorrt_llm"]
    found = parameters(config)
    assert not release.required.keys() - found.keys()
    assert found.keys() - NOT_READ <= release.required.keys() | release.read
    assert not any("${" in value for value in found.values())
    assert declared(config.input) == expected(version, "tensorrt_llm", "input")
    assert declared(config.output) == expected(version, "tensorrt_llm", "output")


@pytest.mark.parametrize("version", UNREAD)
def test_a_release_between_has_what_both_of_its_neighbours_require(
    built: Built, version: str
) -> None:
    engine = built(version)["tensorrt_llm"]
    found, names = parameters(engine), {tensor.name for tensor in engine.input}
    for known in ("0.19.0", "1.2.1"):
        assert not RELEASES[known].required.keys() - found.keys()
        assert found.keys() - NOT_READ <= RELEASES[known].required.keys() | RELEASES[known].read
    # It is not known which release renamed the lengths.
    assert {"seed", "min_tokens", "min_length"} <= names
    assert "random_seed" not in names


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_clients_find_the_tensors_of_their_version(
    built: Built, version: str, options: dict[str, Any]
) -> None:
    """All that the templates have of text, in the same form; ours come in addition."""
    configs = built(version, **options)
    for model in configs.keys() - {"tensorrt_llm"}:
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


@pytest.mark.parametrize("options", [{}, {"decoupled": False}])
def test_nvidias_names_for_the_llm_api_are_taken_too(built: Built, options: dict[str, Any]) -> None:
    wanted = releases()["llmapi"].side("tensorrt_llm", "input")
    found = declared(built("1.2.1", layout="llmapi", **options)["ensemble"].input)
    lacking = {name for name, tensor in wanted.items() if found.get(name) != tensor}
    # One prompt a row here, and one answer to it.
    assert lacking == {
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


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_what_a_client_asks_for_reaches_the_engine_under_its_name(
    built: Built, version: str, options: dict[str, Any]
) -> None:
    """Straight, or by way of preprocessing, which checks it and reads request parameters too."""
    wired = steps(built(version, **options))
    if list(wired) == ["tensorrt_llm_bls"]:
        inputs = wired["tensorrt_llm_bls"].input_map
        assert all(name == value for name, value in inputs.items())
        return
    into, engine, out = wired["preprocessing"], wired["tensorrt_llm"], wired["postprocessing"]
    has = expected(version, "tensorrt_llm", "input")
    followed = 0
    for name in expected(version, "ensemble", "input"):
        inside = RENAMED.get(name, name)
        if inside not in engine.input_map:
            # What an engine would pass over goes to preprocessing, which refuses it.
            guide = name.startswith("guided_decoding_")
            assert inside not in has or name in UNARY_ONLY or guide
            continue
        wire = engine.input_map[inside]
        if wire != name:
            assert into.output_map[f"OUT_{name.upper()}"] == wire
            assert name in into.input_map.values()
        followed += 1
    assert followed >= 10
    assert into.input_map["QUERY"] == "text_input"
    assert into.input_map["REQUEST_OUTPUT_LEN"] == "max_tokens"
    assert into.output_map["INPUT_ID"] == "_INPUT_ID"
    assert out.output_map["OUTPUT"] == "text_output"
    # The engine of 0.5.0 takes no words, and says no lengths.
    assert {name: engine.input_map[name] for name in WIRES if name in has} == {
        name: wire for name, wire in WIRES.items() if name in has
    }
    made = expected(version, "tensorrt_llm", "output")
    for inside, outside in (("output_ids", "TOKENS_BATCH"), ("sequence_length", "SEQUENCE_LENGTH")):
        assert (inside in made) == (outside in out.input_map)
        if inside in made:
            assert engine.output_map[inside] == out.input_map[outside] == f"_{outside}"


@pytest.mark.parametrize("version", VERSIONS)
def test_scheduling_blocks_are_those_of_the_template(built: Built, version: str) -> None:
    asked = {} if version == "0.5.0" else {"max_queue_delay_microseconds": 50}
    config = built(version, **asked)["tensorrt_llm"]
    assert config.backend == "tensorrtllm"
    assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]
    assert config.HasField("dynamic_batching") == (version != "0.5.0")
    if version != "0.5.0":
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
    built: Built, version: str
) -> None:
    """An explicit false among them: the backend's own default may be true."""
    release = Version.parse(version)
    known = [p for p in PARAMETERS if p.exists_in(release) and p.name != "max_beam_width"]
    asked = {p.name: TOGETHER.get(p.name, (p.choices or (GIVEN[p.kind],))[0]) for p in known}
    found = parameters(built(version, **asked)["tensorrt_llm"])
    for parameter in known:
        value = asked[parameter.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert found[parameter.key(release)] == text
    # What is left is of encoder-decoder models, or has had no effect for long.
    assert RELEASES[version].read - found.keys() <= {
        "cross_kv_cache_fraction", "encoder_model_path", "enable_trt_overlap", "max_beam_width",
        "recv_poll_period_ms",
    }  # fmt: skip
    # An engine that is not told leaves it to the version.
    switches = {p.key(release) for p in known if p.kind is bool and p.default == ""}
    assert not switches & parameters(built(version)["tensorrt_llm"]).keys()


@pytest.mark.parametrize("version", LATER)
def test_a_decoding_mode_is_one_that_the_version_knows(version: str) -> None:
    (option,) = (p for p in PARAMETERS if p.name == "decoding_mode")
    for mode in option.choices:
        asked = {**DEFAULTS, "batching": "inflight", "decoding_mode": mode}
        if mode not in RELEASES[version].modes:
            why = f"has no decoding_mode {mode}"
        elif mode == "lookahead":
            why = "decoding_mode lookahead needs lookahead_window_size"
        else:
            refuse(asked, Version.parse(version))
            continue
        with pytest.raises(IncompatibleError, match=why):
            refuse(asked, Version.parse(version))
