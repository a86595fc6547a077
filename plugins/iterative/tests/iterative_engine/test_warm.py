"""Prompts that stay warm: a later engine reads what an earlier one has computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.runtime import (
    Chunk,
    Engine,
    Generation,
    PageFiles,
    PageRunner,
    PromptLookup,
    StatePageRunner,
    StateRunner,
    WarmPages,
)
from llmserve.testing import ByteTokenizer, generation
from llmserve.testing.tiny_models import make_model
from llmserve_iterative.runner import FlatRunner, PaddedRunner, StatesRunner, make_runner

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


WITH_STATES = ["qwen3_next", "lfm2", "mamba2", "bamba"]
"""Three hybrids, and one whose layers have nothing but states."""


def ask(family: str, folder: Path, prompt: list[int], length: int = 40) -> tuple[Generation, int]:
    """Ask a new engine; return the answer, which is that of the model alone, and how many tokens
    were read from disk."""
    engine = restarted(family, folder)
    assert isinstance(engine._runner, StatePageRunner)
    engine.admit(request := generation(prompt, length))
    finish(engine)
    engine.close()
    assert same_as_alone(family, request)
    return request, engine.warm_tokens


@pytest.mark.parametrize("family", WITH_STATES)
def test_states_are_read_from_disk_after_a_restart(family: str, tmp_path: Path) -> None:
    prompts = [[*BEGINNING, 1, 2], [*BEGINNING, 3], [*BEGINNING[:66], 5, 6], [*BEGINNING[:60], 7]]
    found = []
    for prompt in prompts:
        request, read = ask(family, tmp_path / "pages", prompt)
        found.append((request.cached_tokens, read))
    assert found == [(0, 0), (64, 64), (64, 64), (0, 0)]
    # The answer of the first went on to the 111th token.
    first, _ = ask(family, tmp_path / "pages", prompts[0])
    whole = [*first.prompt_ids, *first.token_ids, 1]
    assert ask(family, tmp_path / "pages", whole, 8)[1] == 96


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_many_that_decode_together_go_on_from_states_on_disk(family: str, tmp_path: Path) -> None:
    prompts = [[*BEGINNING, n] for n in range(4)]
    for expected in (0, 64):
        engine = restarted(family, tmp_path / "pages")
        requests = [generation(prompt, 30 + n) for n, prompt in enumerate(prompts)]
        engine.admit(requests[0])
        engine.step()
        for request in requests[1:]:
            engine.admit(request)
        finish(engine)
        engine.close()
        assert all(same_as_alone(family, request) for request in requests)
        assert requests[0].cached_tokens == expected


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_a_damaged_state_is_computed(family: str, damage: str, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "pages", [*BEGINNING, 4]
    ask(family, folder, prompt, 8)
    files = [path for path in folder.iterdir() if path.name != "lock"]
    # There are two pages of one size, if it has any, and the state after 64 tokens.
    sizes = Counter(path.stat().st_size for path in files)
    (state,) = (path for path in files if sizes[path.stat().st_size] == 1)
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    if damage == "gone":
        state.unlink()
    else:
        state.write_bytes(content if damage == "a bit" else content[:-1])
    assert ask(family, folder, prompt)[1] == 0
    assert ask(family, folder, prompt)[1] == 64


def test_a_state_in_half_precision_is_what_it_was() -> None:
    for family in WITH_STATES:
        runner = make_runner(make_model(family).to(torch.bfloat16), 64)
        assert isinstance(runner, StatesRunner)
        runner.run([Chunk([5, 6, 7], 0, [0], state=4)])
        content = runner.read_state(4)
        assert any(content)
        assert runner.write_state(5, content)
        assert runner.read_state(5) == content
        assert not runner.write_state(5, content[1:])
        assert runner.read_state(5) == content


def test_the_form_of_a_state_is_part_of_that_of_pages() -> None:
    runners: list[Any] = [
        make_runner(make_model("mamba2", dtype, state_size=size), 64)
        for dtype in (torch.float32, torch.bfloat16)
        for size in (8, 16)
    ]
    forms = [runner.page_form for runner in runners]
    assert all(forms)
    assert len(set(forms)) == 4


def test_a_model_that_is_read_token_by_token_keeps_no_copies() -> None:
    runner = make_runner(make_model("mamba"), 64)
    assert isinstance(runner, StateRunner)
    assert runner.most_copies == 0
