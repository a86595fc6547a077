"""What Acme's author tests; run where the package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmserve
from llmserve.errors import RequestRejectedError
from llmserve.testing import LiveTriton, RecipeConformance, check_repository


class TestAcme(RecipeConformance):
    """The suite that every recipe has to pass."""

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


def test_what_a_stage_refuses_reaches_the_client(triton: LiveTriton) -> None:
    name = triton.build("acme-echo")
    with pytest.raises(RequestRejectedError, match="max_tokens must be from 1"):
        triton.client.generate(name, "Hello", max_tokens=-1)
    with pytest.raises(RequestRejectedError, match="text_input is empty"):
        triton.client.generate(name, "")
    assert triton.client.generate(name, "Hello").text == "Hello"


def test_an_ensemble_and_its_parts_are_checked_together(tmp_path: Path) -> None:
    built = llmserve.build("acme-echo", "demo", output=tmp_path / "repo")
    assert built.manifest.parts == ["demo_echo", "demo_read", "demo_write"]
    assert not check_repository(built.repository)
    (built.repository / "demo_read").rename(tmp_path / "away")
    told = {problem.what for problem in check_repository(built.repository)}
    assert "its part demo_read is missing" in told
    assert "its step demo_read is no model of this repository" in told
    (built.repository / "demo").rename(tmp_path / "gone")
    told = {problem.what for problem in check_repository(built.repository)}
    assert "it is a part of demo, which is not here or no longer needs it" in told


def test_building_an_ensemble_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    built = [llmserve.build("acme-echo", "demo", output=tmp_path / n / "repo") for n in "ab"]
    for model in ("demo", *built[0].manifest.parts):
        files = [
            {p.name: p.read_bytes() for p in (b.repository / model).rglob("*") if p.is_file()}
            for b in built
        ]
        assert files[0] == files[1]
