"""Versions, containers, engines and batching: what fits together, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import ConfigError, IncompatibleError, LLMServeError, OptionError
from llmserve_trtllm import target, versions
from llmserve_trtllm.engine import check_engine, check_vocabulary, read_engine
from llmserve_trtllm.versions import Version

from .building import ENGINES

OPTIONS: dict[str, Any] = {
    "max_batch_size": 8, "max_beam_width": 1, "gpu_device_ids": "", "multi_gpu": "leader",
    "decoding_mode": "", "lookahead_window_size": "", "lookahead_ngram_size": "",
    "lookahead_verification_set_size": "", "guided_decoding_backend": "",
    "xgrammar_tokenizer_info_path": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.0", (0, 5, 0)),
        ("v0.12.0", (0, 12, 0)),
        ("0.19", (0, 19, 0)),
        ("1.2.0rc6.post2", (1, 2, 0)),
        ("0.9.0.dev2024022700", (0, 9, 0)),
        ("1.0.3.2510", (1, 0, 3)),
    ],
)
def test_versions_are_read_as_nvidia_writes_them(text: str, version: tuple[int, ...]) -> None:
    assert Version.parse(text) == Version(*version)


def test_a_container_tells_its_version() -> None:
    assert versions.choose_version("", "24.08") == Version(0, 12)
    image = "nvcr.io/nvidia/tritonserver:25.12-trtllm-python-py3"
    assert versions.choose_version("", image) == Version(1, 1)
    assert versions.choose_version("0.12", "24.08") == Version(0, 12)
    assert versions.choose_version("", "") == versions.DEFAULT
    for tag, version in versions.CONTAINERS.items():
        assert versions.container_version(tag) == version


@pytest.mark.parametrize(
    ("tag", "version"),
    [("24.04", "0.9.0"), ("25.02", "0.17.0"), ("25.03", "0.18.0"), ("25.04", "0.18.2"),
     ("25.05", "0.19.0"), ("26.01", "1.1.0"), ("26.02", "1.1.0"), ("26.03", "1.2.0")],
)  # fmt: skip
def test_every_container_of_nvidias_matrix_is_known(tag: str, version: str) -> None:
    assert versions.container_version(tag) == Version.parse(version)


def test_a_container_with_another_version_is_refused_naming_both() -> None:
    with pytest.raises(IncompatibleError, match=r"0\.19\.0 was asked for.*24\.08 has 0\.12\.0"):
        versions.choose_version("0.19.0", "24.08")


@pytest.mark.parametrize(
    ("version", "message"),
    [("1.3.0", r"no engine backend.*layout=llmapi"), ("0.9.0", r"0\.9\.0 are not in the table")],
)
def test_a_version_that_runs_no_engine_is_refused(version: str, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        versions.check_engine_layout(Version.parse(version))


def test_an_old_version_has_no_llm_api() -> None:
    with pytest.raises(IncompatibleError, match="layout=engine"):
        versions.check_llmapi_layout(Version(0, 19))


@pytest.mark.parametrize(
    ("folder", "version", "input_len", "seq_len"),
    [
        ("0.5", None, 384, 512),
        ("0.9", Version(0, 9), 384, 512),
        ("0.12", Version(0, 12), 511, 512),
        ("0.19", Version(0, 19), 511, 512),
        ("1.2", Version(1, 2, 1), 511, 512),
    ],
)
def test_an_engine_is_read_in_the_form_of_its_version(
    folder: str, version: Version | None, input_len: int, seq_len: int
) -> None:
    engine = read_engine(ENGINES / folder)
    assert engine.version == version
    assert (engine.max_input_len, engine.max_seq_len) == (input_len, seq_len)
    assert (engine.vocab_size, engine.max_batch_size, engine.world_size) == (1024, 64, 1)
    assert engine.packed_input
    assert engine.paged_kv_cache


def spoiled(folder: Path, source: str, *keys: str, value: Any) -> Path:
    content = json.loads((ENGINES / source / "config.json").read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_an_engine_of_another_version_is_refused_naming_both(tmp_path: Path) -> None:
    engine = read_engine(spoiled(tmp_path, "1.2", "version", value="0.16.0"))
    with pytest.raises(IncompatibleError, match=r"TensorRT-LLM 0\.16\.0, and this is for 1\.2\.1"):
        check_engine(engine, Version(1, 2, 1), batching="inflight", options=OPTIONS)


def test_an_engine_that_names_no_version_is_of_an_old_one() -> None:
    with pytest.raises(IncompatibleError, match=r"before 0\.8\.0, and this is for 0\.12\.0"):
        check_engine(
            read_engine(ENGINES / "0.5"), Version(0, 12), batching="inflight", options=OPTIONS
        )


@pytest.mark.parametrize(
    ("source", "keys", "value", "message"),
    [
        ("1.2", ("build_config", "plugin_config", "remove_input_padding"), False, "packed input"),
        ("1.2", ("build_config", "kv_cache_type"), "CONTINUOUS", "paged KV cache"),
        ("0.12", ("build_config", "plugin_config", "paged_kv_cache"), False, "paged KV cache"),
        ("0.5", ("plugin_config", "paged_kv_cache"), False, "paged KV cache"),
        ("0.5", ("plugin_config", "remove_input_padding"), False, "packed input"),
    ],
)
def test_in_flight_batching_needs_packed_input_and_a_paged_cache(
    tmp_path: Path, source: str, keys: tuple[str, ...], value: Any, message: str
) -> None:
    engine = read_engine(spoiled(tmp_path, source, *keys, value=value))
    version = engine.version or Version(0, 5)
    with pytest.raises(IncompatibleError, match=f"{message}.*--batching static"):
        check_engine(engine, version, batching="inflight", options=OPTIONS)
    check_engine(engine, version, batching="static", options=OPTIONS)


def test_a_build_may_not_ask_for_more_than_the_engine_has() -> None:
    engine = read_engine(ENGINES / "1.2")
    version = Version(1, 2, 1)
    for asked, message in (
        ({"max_batch_size": 65}, "max_batch_size 65 is over the engine's 64"),
        ({"max_beam_width": 2}, "max_beam_width 2 is over the engine's 1"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            check_engine(engine, version, batching="inflight", options={**OPTIONS, **asked})


def test_every_part_of_an_engine_has_to_be_there(tmp_path: Path) -> None:
    folder = spoiled(tmp_path, "1.2", "pretrained_config", "mapping", value={"tp_size": 2})
    (folder / "rank0.engine").touch()
    with pytest.raises(ConfigError, match="holds 1 of the 2 parts"):
        check_engine(read_engine(folder), Version(1, 2, 1), batching="inflight", options=OPTIONS)
    (folder / "rank1.engine").touch()
    check_engine(read_engine(folder), Version(1, 2, 1), batching="inflight", options=OPTIONS)


def test_a_tokenizer_that_is_not_the_engines_is_refused() -> None:
    engine = read_engine(ENGINES / "1.2")
    check_vocabulary(engine, 1000, 999)
    with pytest.raises(IncompatibleError, match="ids up to 1024, and the engine"):
        check_vocabulary(engine, 1025, 1024)
    with pytest.raises(IncompatibleError, match="a vocabulary of 600, and the engine"):
        check_vocabulary(engine, 600, 599)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("build_config", "max_seq_len"), -5, "says max_seq_len -5, which no engine has"),
        (("build_config", "max_input_len"), 513, "max_input_len 513, over its max_seq_len 512"),
        (
            ("pretrained_config", "mapping"),
            {"world_size": 4, "tp_size": 2, "pp_size": 1},
            "world_size 4 and tp_size 2 times pp_size 1",
        ),
        (("build_config", "max_batch_size"), "many", "something in it has another form"),
    ],
)
def test_what_no_engine_can_be_is_refused(
    tmp_path: Path, keys: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_engine(spoiled(tmp_path, "1.2", *keys, value=value))


@pytest.mark.parametrize(
    ("built", "mode"), [("MEDUSA", "medusa"), (32, "eagle"), ("EXPLICIT_DRAFT_TOKENS", "redrafter")]
)
def test_an_engine_that_speculates_needs_its_decoding_mode(
    tmp_path: Path, built: object, mode: str
) -> None:
    keys = ("build_config", "speculative_decoding_mode")
    engine = read_engine(spoiled(tmp_path, "1.2", *keys, value=built))
    version = Version(1, 2, 1)
    with pytest.raises(IncompatibleError, match=f"give --decoding-mode {mode}"):
        check_engine(engine, version, batching="inflight", options=OPTIONS)
    asked = {**OPTIONS, "decoding_mode": mode}
    check_engine(engine, version, batching="inflight", options=asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"decoding_mode": "lookahead"}, "lookahead needs lookahead_window_size, lookahead_ngram"),
        ({"guided_decoding_backend": "xgrammar"}, "has no effect without"),
        ({"xgrammar_tokenizer_info_path": "/x.json"}, "has no effect without"),
    ],
)
def test_what_would_have_no_effect_is_refused(asked: dict[str, Any], message: str) -> None:
    engine = read_engine(ENGINES / "1.2")
    with pytest.raises(IncompatibleError, match=message):
        check_engine(engine, Version(1, 2, 1), batching="inflight", options={**OPTIONS, **asked})


def test_a_model_given_as_an_engine_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
    with pytest.raises(ConfigError, match="holds a model and no engine: give it with --model"):
        read_engine(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"build_config": {}}', '{"builder_config": {}}'])
def test_what_is_no_engine_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_engine(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_engine(tmp_path)
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value), "a Python error's name says nothing to a user"
    with pytest.raises(ConfigError, match="there is no engine at"):
        read_engine(tmp_path / "nowhere")


def test_batching_has_the_words_of_the_version() -> None:
    v1 = target.engine_batching("static", "guaranteed_no_evict", Version(0, 12))
    assert v1["gpt_model_type"] == "V1"
    ifb = target.engine_batching("inflight", "max_utilization", Version(1, 2))
    assert ifb == {
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "max_utilization",
    }
    with pytest.raises(IncompatibleError, match=r"1\.2\.0 does not run static.*layout=llmapi"):
        target.engine_batching("static", "guaranteed_no_evict", Version(1, 2))
    with pytest.raises(IncompatibleError, match=r"0\.21\.0 does not run static") as caught:
        target.engine_batching("static", "guaranteed_no_evict", Version(0, 21))
    assert "llmapi" not in str(caught.value), "which that version refuses in turn"
    assert target.llmapi_policy("static", "guaranteed_no_evict") == "STATIC_BATCH"
    assert target.llmapi_policy("inflight", "max_utilization") == "MAX_UTILIZATION"
    with pytest.raises(IncompatibleError, match="no scheduler max_utilization"):
        target.llmapi_policy("static", "max_utilization")
    with pytest.raises(IncompatibleError, match="choose one of inflight, static"):
        target.check_batching("dynamic")


def test_the_tutorials_word_is_taken_with_a_warning_that_says_why() -> None:
    told: list[str] = []
    assert target.scheduler_of("guaranteed_completion", told.append) == "guaranteed_no_evict"
    assert "no version of TensorRT-LLM has ever known guaranteed_completion" in told[0]
    assert target.scheduler_of("max_utilization", told.append) == "max_utilization"
    assert len(told) == 1


def test_errors_are_of_the_tree() -> None:
    with pytest.raises(OptionError):
        Version.parse("new")
    assert issubclass(IncompatibleError, LLMServeError)
