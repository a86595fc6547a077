"""Tests of `llmserve check` on repositories made by hand from TensorRT-LLM's templates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import CheckedModel, check_repository
from llmserve.testing import read_config
from llmserve_trtllm.check import check_model

from .building import cases, engine_of
from .nvidia import releases

TEMPLATES = Path(__file__).with_name("templates")
UNGUARDED = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Return a correct repository of five models with a matching engine."""
    engine = engine_of(tmp_path / "engine", "0.12.0")
    repository = tmp_path / "repo"
    shutil.copytree(TEMPLATES, repository)
    change(repository, "tensorrt_llm", "/engine", str(engine))
    for config in repository.glob("*/config.pbtxt"):
        (config.parent / "1").mkdir()
        if 'backend: "python"' in config.read_text():
            (config.parent / "1" / "model.py").touch()
    assert check_repository(repository) == []
    return repository


def change(repo: Path, model: str, old: str, new: str) -> None:
    path = repo / model / "config.pbtxt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(("model", "old", "new", "what", "fatal"), cases("faults"))
def test_a_fault_is_reported_with_its_fix(
    repo: Path, model: str, old: str, new: str, what: str, fatal: bool
) -> None:
    change(repo, model, old, new)
    problems = [problem for problem in check_repository(repo) if problem.where == model]
    assert any(what in problem.message and problem.fatal == fatal for problem in problems), problems
    assert all(problem.hint for problem in problems)


@pytest.mark.parametrize("release", [name for name in releases() if name != "llmapi"])
@pytest.mark.parametrize("missing", UNGUARDED)
def test_a_parameter_that_is_read_without_a_default_is_required(release: str, missing: str) -> None:
    """Only for versions whose backend reads it so; the template's tensors show the version."""
    config = read_config(TEMPLATES / "tensorrt_llm")
    for name in UNGUARDED:
        config.parameters[name].string_value = ""
    for name in releases()[release].side("tensorrt_llm", "input"):
        config.input.add(name=name)
    model = CheckedModel(TEMPLATES / "tensorrt_llm", config, {})
    assert not any("without which" in problem.message for problem in check_model(model))
    del config.parameters[missing]
    is_reported = any(f"no parameter {missing}, without" in p.message for p in check_model(model))
    assert is_reported == (missing in releases()[release].required)


@pytest.mark.parametrize(
    ("version", "changes", "what"),
    [
        ("0.9.0", {}, "template is for TensorRT-LLM 0.11.0 or later and its engine for 0.9.0"),
        ("0.12.0", {"build_config.plugin_config.remove_input_padding": False}, "packed input"),
    ],
)
def test_an_engine_that_does_not_fit(
    repo: Path, version: str, changes: dict[str, Any], what: str
) -> None:
    engine_of(repo.parent / "engine", version, changes)
    assert what in check_repository(repo)[0].message


def test_streaming_from_an_engine_that_is_not_decoupled(repo: Path) -> None:
    change(repo, "tensorrt_llm", "decoupled: True", "decoupled: False")
    problems = {problem.where: problem.message for problem in check_repository(repo)}
    assert "tensorrt_llm is not decoupled" in problems["ensemble"]
    assert problems["tensorrt_llm_bls"] == "it is decoupled and tensorrt_llm is not decoupled"
