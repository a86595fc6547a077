"""Versions, containers, engines and batching: what fits together, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import ConfigError, IncompatibleError, LLMServeError, OptionError
from llmserve_trtllm import batching, versions
from llmserve_trtllm.engine import read_engine
from llmserve_trtllm.fitting import check_engine, check_vocabulary
from llmserve_trtllm.versions import Version

from .building import ENGINES

OPTIONS: dict[str, Any] = {"max_batch_size": 8, "max_beam_width": 1}


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


@pytest.mark.parametrize("text", ["{", "[]", '{"build_config": {}}', '{"builder_config": {}}'])
def test_what_is_no_engine_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_engine(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_engine(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="there is no engine at"):
        read_engine(tmp_path / "nowhere")


def test_batching_has_the_words_of_the_version() -> None:
    v1 = batching.engine_batching("static", "guaranteed_no_evict", Version(0, 12))
    assert v1["gpt_model_type"] == "V1"
    ifb = batching.engine_batching("inflight", "max_utilization", Version(1, 2))
    assert ifb == {
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "max_utilization",
    }
    with pytest.raises(IncompatibleError, match=r"1\.2\.0 does not run static.*layout=llmapi"):
        batching.engine_batching("static", "guaranteed_no_evict", Version(1, 2))
    assert batching.llmapi_policy("static", "guaranteed_no_evict") == "STATIC_BATCH"
    assert batching.llmapi_policy("inflight", "max_utilization") == "MAX_UTILIZATION"
    with pytest.raises(IncompatibleError, match="no scheduler max_utilization"):
        batching.llmapi_policy("static", "max_utilization")
    with pytest.raises(IncompatibleError, match="choose one of inflight, static"):
        batching.check_batching("dynamic")


def test_the_tutorials_word_is_taken_with_a_warning_that_says_why() -> None:
    told: list[str] = []
    assert batching.scheduler_of("guaranteed_completion", told.append) == "guaranteed_no_evict"
    assert "no version of TensorRT-LLM has ever known guaranteed_completion" in told[0]
    assert batching.scheduler_of("max_utilization", told.append) == "max_utilization"
    assert len(told) == 1


def test_errors_are_of_the_tree() -> None:
    with pytest.raises(OptionError):
        Version.parse("new")
    assert issubclass(IncompatibleError, LLMServeError)
