"""Tests of which versions, containers and engines fit together, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import ConfigError, LLMServeError, OptionError
from llmserve.plugin import Manifest
from llmserve_trtllm.engine import check_engine, read_engine
from llmserve_trtllm.target import resolve_scheduler
from llmserve_trtllm.versions import Version, choose_version

from .building import DEFAULTS, ENGINES, build, cases, engine_of


@pytest.mark.parametrize(("version", "container", "expected"), cases("containers"))
def test_a_version_is_chosen_by_nvidias_notation_or_by_its_container(
    version: str, container: str, expected: str
) -> None:
    assert str(choose_version(version.strip("-"), container.strip("-"))) == expected


def test_an_invalid_version_is_refused() -> None:
    with pytest.raises(OptionError, match="'new' is not a version"):
        Version.parse("new")


@pytest.mark.parametrize(
    ("version", "sampler"),
    [("1.0.3", ""), ("1.1.0", "TRTLLMSampler"), ("1.2.1", "TRTLLMSampler"), ("1.3.0", "")],
)
def test_the_llm_api_samples_with_what_honours_every_option(
    version: str, sampler: str, tmp_path: Path
) -> None:
    build(tmp_path, version, layout="llmapi")
    manifest = Manifest.read(tmp_path / version / "tensorrt_llm")
    assert manifest is not None
    assert manifest.components["stage"]["settings"]["sampler_type"] == sampler


@pytest.mark.parametrize(
    ("form", "version", "input_len"),
    [("0.5", None, 384), ("0.9", "0.9.0", 384), ("0.12", "0.12.0", 511), ("0.19", "0.19.0", 511),
     ("1.2", "1.2.1", 511)],
)  # fmt: skip
def test_an_engine_is_read_in_the_form_of_its_version(
    form: str, version: str | None, input_len: int
) -> None:
    engine = read_engine(ENGINES / form)
    assert engine.version == (version and Version.parse(version))
    assert (engine.max_input_len, engine.max_seq_len) == (input_len, 512)
    assert (engine.vocab_size, engine.max_batch_size, engine.world_size) == (1024, 64, 1)
    assert engine.packed_input
    assert engine.paged_kv_cache


@pytest.mark.parametrize(
    ("engine", "version", "changes", "options", "message"), cases("refused engines")
)
def test_an_engine_that_the_build_cannot_use_is_refused(
    tmp_path: Path, engine: str, version: str, changes: Any, options: Any, message: str
) -> None:
    folder = engine_of(tmp_path / "engine", engine, changes)
    (folder / "rank0.engine").touch()
    with pytest.raises(LLMServeError, match=message) as caught:
        build(tmp_path, version, engine=str(folder), **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / version).exists()


def test_a_matching_engine_is_accepted(tmp_path: Path) -> None:
    changes = {
        "pretrained_config.mapping": {"tp_size": 2},
        "build_config.speculative_decoding_mode": "MEDUSA",
        "build_config.plugin_config.remove_input_padding": False,
    }
    folder = engine_of(tmp_path, "1.2.1", changes)
    for rank in (0, 1):
        (folder / f"rank{rank}.engine").touch()
    options = {**DEFAULTS, "max_batch_size": 64, "decoding_mode": "medusa", "gpu_device_ids": "0,1"}
    check_engine(read_engine(folder), Version(1, 2, 1), batching="static", options=options)


@pytest.mark.parametrize(("content", "message"), cases("not engines"))
def test_other_folders_are_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_engine(tmp_path)
    text = json.dumps(content) if isinstance(content, dict) else content
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_engine(tmp_path)
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value), "the name of a Python error means nothing to a user"
    with pytest.raises(ConfigError, match="there is no engine at"):
        read_engine(tmp_path / "nowhere")


def test_the_tutorials_scheduler_name_is_replaced_with_a_warning() -> None:
    lines: list[str] = []
    assert resolve_scheduler("guaranteed_completion", lines.append) == "guaranteed_no_evict"
    assert "no version of TensorRT-LLM has ever supported guaranteed_completion" in lines[0]
    assert resolve_scheduler("max_utilization", lines.append) == "max_utilization"
    assert len(lines) == 1
