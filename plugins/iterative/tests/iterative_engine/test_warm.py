"""Prompts that stay warm: a later engine reads what an earlier one has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.runtime import Engine, PageFiles, PageRunner, PromptLookup, StateRunner, WarmPages
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_models import make_model
from llmserve_iterative.runner import FlatRunner, PaddedRunner, make_runner

from .families import finish, same_as_alone

BEGINNING = [(11 * i) % 90 for i in range(70)]


def restarted(family: str, folder: Path, *, tokens: int = 512, guesses: bool = False) -> Engine:
    runner = make_runner(make_model(family), tokens)
    assert isinstance(runner, PageRunner)
    warm = WarmPages(runner, PageFiles(folder, 100_000_000), b"model", family)
    guesser = PromptLookup(3) if guesses else None
    return Engine(runner, ByteTokenizer(), max_sequences=4, warm=warm, guesser=guesser)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt2", FlatRunner),
        ("llama", FlatRunner),
        ("mistral", FlatRunner),
        ("gemma2", FlatRunner),
        ("gemma3", FlatRunner),
        ("qwen2_moe", PaddedRunner),
        ("falcon_alibi", PaddedRunner),
        ("bloom", PaddedRunner),
    ],
)
def test_an_answer_is_the_same_after_a_restart(
    family: str, kind: type[object], tmp_path: Path
) -> None:
    found = []
    for prompt in ([*BEGINNING, 1, 2], [*BEGINNING, 3], [*BEGINNING, 1, 2]):
        engine = restarted(family, tmp_path / "pages", guesses=True)
        assert isinstance(engine._runner, kind)
        engine.admit(request := generation(prompt, 40))
        finish(engine)
        engine.close()
        assert same_as_alone(family, request)
        found.append((request.cached_tokens, engine.warm_tokens))
    assert found == [(0, 0), (64, 64), (64, 64)]


def test_a_sequence_that_lost_its_pages_finds_them_again(tmp_path: Path) -> None:
    engine = restarted("gpt2", tmp_path / "pages", tokens=128)
    first, last = generation([1] * 20, 90), generation([2] * 20, 90)
    for request in (first, last):
        engine.admit(request)
    finish(engine)
    engine.close()
    assert same_as_alone("gpt2", first)
    assert same_as_alone("gpt2", last)
    assert last.cached_tokens == 0


@pytest.mark.parametrize("family", ["llama", "falcon_alibi"])
def test_a_session_outlives_others_and_its_answer_stays_the_same(
    family: str, tmp_path: Path
) -> None:
    engine = restarted(family, tmp_path / "pages", tokens=512)
    found = []
    for n in (0, *range(1, 9), 0):
        engine.admit(request := generation([n, *BEGINNING], 20, keep_longer=not n))
        finish(engine)
        assert same_as_alone(family, request)
        found.append(request.cached_tokens)
    engine.close()
    assert found == [0] * 9 + [64]
    assert engine.warm_tokens == 0, "it was in memory"


def test_log_probabilities_of_a_prompt_are_computed(tmp_path: Path) -> None:
    prompt = [*BEGINNING, 4]
    for _ in range(2):
        engine = restarted("llama", tmp_path / "pages")
        engine.admit(request := generation(prompt, 3, prompt_logprobs=1))
        finish(engine)
        engine.close()
        assert request.cached_tokens == 0
        assert len(request.prompt_logprobs) == len(prompt)


def test_a_page_in_half_precision_is_what_it_was() -> None:
    runner = make_runner(make_model("falcon_alibi").to(torch.bfloat16), 64)
    assert isinstance(runner, PaddedRunner)
    content = runner.read_page(1)
    assert any(content), "the trial has written there"
    assert runner.write_page(0, content)
    assert runner.read_page(0) == content
    assert not runner.write_page(0, content[1:])


def test_the_form_of_a_page_tells_types_and_shapes_apart() -> None:
    runners: list[Any] = [
        make_runner(make_model(family).to(dtype), 64)
        for family in ("gpt2", "llama", "falcon_alibi", "bloom")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    forms = [runner.page_form for runner in runners]
    assert all(forms)
    assert len(set(forms)) == len(forms)


def test_a_model_with_states_keeps_no_pages() -> None:
    assert isinstance(make_runner(make_model("mamba"), 64), StateRunner)
