"""Tests by Acme's author; they run where the package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmserve
from llmserve.errors import RequestRejectedError
from llmserve.plugin import check_repository
from llmserve.testing import LiveTriton, RecipeConformance


class TestAcme(RecipeConformance):
    """The suite that every recipe must pass."""

    recipe = "acme"


def test_an_ensemble_answers_every_prompt_of_a_request(triton: LiveTriton) -> None:
    name = triton.build("acme-echo")
    prompts = ["Hello there", "Once upon a time", "A"]
    answers = triton.client.generate(name, prompts)
    assert [answer.text for answer in answers] == prompts
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    short = triton.client.generate(name, "Once upon a time", max_tokens=2)
    assert "Once upon a time".startswith(short.text)
    assert short.output_tokens == 2


def test_an_error_of_a_stage_reaches_the_client(triton: LiveTriton) -> None:
    name = triton.build("acme-echo")
    with pytest.raises(RequestRejectedError) as refused:
        triton.client.generate(name, "Hello", max_tokens=-1)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "max_tokens")
    with pytest.raises(RequestRejectedError) as refused:
        triton.client.generate(name, "")
    assert refused.value.code == "empty_prompt"
    assert triton.client.generate(name, "Hello").text == "Hello"


def test_an_ensemble_and_its_parts_are_checked_together(tmp_path: Path) -> None:
    build = llmserve.build("acme-echo", "demo", output=tmp_path / "repo")
    assert build.manifest.parts == ["demo_echo", "demo_read", "demo_write"]
    assert not check_repository(build.repository)
    (build.repository / "demo_read").rename(tmp_path / "away")
    problems = {problem.message for problem in check_repository(build.repository)}
    assert "its part demo_read is missing" in problems
    assert "its step demo_read is not a model of this repository" in problems
    (build.repository / "demo").rename(tmp_path / "gone")
    problems = {problem.message for problem in check_repository(build.repository)}
    assert "it is a part of demo, which is not here or no longer needs it" in problems


def test_building_an_ensemble_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    builds = [llmserve.build("acme-echo", "demo", output=tmp_path / n / "repo") for n in "ab"]
    for model in ("demo", *builds[0].manifest.parts):
        files = [
            {p.name: p.read_bytes() for p in (b.repository / model).rglob("*") if p.is_file()}
            for b in builds
        ]
        assert files[0] == files[1]
