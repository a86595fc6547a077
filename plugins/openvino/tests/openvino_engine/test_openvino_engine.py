"""The engine in process: prompt lookup, and a step that fails and must not break the next."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.runtime import Generation, RequestError
from llmserve.testing import ByteTokenizer
from tests import support


class Poisoned:
    """A pipeline as one request can leave it: every step fails."""

    def __init__(self, pipeline: Any) -> None:
        self.add_request = pipeline.add_request

    def step(self) -> None:
        raise RuntimeError("Check failed")


def generation(prompt: Sequence[int] = (40, 50, 60), length: int = 8, **asked: Any) -> Generation:
    end = frozenset({0})
    return support.generation(prompt, length, eos=end, decode=lambda ids: "x" * len(ids), **asked)


def made_of(converted: Path, output: Path, **options: Any) -> Any:
    from llmserve_openvino.engine import OpenVinoGenerator

    built = llmserve.build("openvino", str(converted), output=output, **options)
    settings = built.manifest.components["generator"]["settings"]
    return OpenVinoGenerator(settings, built.folder / "1")


@pytest.mark.parametrize(
    "asked",
    [{}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "seed": 7}, {"presence_penalty": 1.5}],
    ids=str,
)
def test_prompt_lookup_gives_the_same_tokens_in_fewer_steps(
    converted: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    # The last has been asked and answered before.
    first = generation([40, 50, 60], 60, ignore_eos=True)
    made_of(converted, tmp_path / "first", dtype="float32").generate([first], ByteTokenizer())
    prompts = [[7, 8, 9] * 6, list(range(30, 60)), [40, 50, 60, *first.token_ids, 40, 50, 60]]
    answers, steps = [], []
    for lookup in (0, 5):
        made = made_of(converted, tmp_path / str(lookup), dtype="float32", prompt_lookup=lookup)
        generations = [generation(prompt, 60, ignore_eos=True, **asked) for prompt in prompts]
        for each in generations:
            made.engine.admit(each)
        count = 0
        while made.engine.busy:
            assert not made.engine.step().failed
            count += sum(not each.done for each in generations)
        answers.append([each.token_ids for each in generations])
        steps.append(count)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0]


def test_a_draft_model_gives_the_same_tokens_in_fewer_steps(
    converted: Path, tmp_path: Path
) -> None:
    prompts = [[7, 8, 9] * 6, list(range(30, 60)), [40, 50, 60]]
    # Together more than OpenVINO computes in a step, of which it would lose count.
    prompts += [[(13 * i * i + row) % 1000 + 1 for i in range(110)] for row in range(8)]
    answers: list[list[list[int]]] = []
    steps: list[int] = []
    for options in ({}, {"draft_model": str(converted), "draft_tokens": 3}):
        made = made_of(converted, tmp_path / str(len(answers)), dtype="float32", **options)
        asked: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.5}]
        several = [
            generation(prompt, 40, ignore_eos=True, **own)
            for prompt, own in zip(prompts, cycle(asked))
        ]
        leaves = generation([1, 2, 3], 40, ignore_eos=True)
        for each in (*several, leaves):
            made.engine.admit(each)
        count = 0
        while made.engine.busy:
            assert not made.engine.step().failed
            count += 1
            if count == 2:
                made.engine.drop(leaves)
        answers.append([each.token_ids for each in several])
        steps.append(count)
    assert answers[0] == answers[1]
    assert steps[1] * 2 < steps[0]
    for wish in ({"temperature": 0.8}, {"min_tokens": 4}):
        with pytest.raises(RequestError, match="it has a draft model"):
            made.engine.admit(generation([40], 8, **wish))


def test_a_prompt_longer_than_a_step_is_read_whole_beside_guesses(
    converted: Path, tmp_path: Path
) -> None:
    """Two prompts are more than OpenVINO reads in a step, and with guesses it lost count of one."""
    guessing = made_of(converted, tmp_path / "guessing", dtype="float32", prompt_lookup=4)
    alone = made_of(converted, tmp_path / "alone", dtype="float32")
    for seed in range(8):
        rng = random.Random(seed)
        head, first, *rest = (
            [rng.randrange(1, 1000) for _ in range(n)] for n in (260, 32, 1, 1, 90)
        )
        second = generation([*head, *rest[0]], 2, ignore_eos=True)
        third = generation([*head, *rest[1]], 30, ignore_eos=True, presence_penalty=1.0)
        last = generation([*head, *rest[2]], 8, ignore_eos=True)
        leaves = generation(first, 7, ignore_eos=True, repetition_penalty=1.3)
        for each in (leaves, second, third):
            guessing.engine.admit(each)
        for _ in range(2):
            guessing.engine.step()
        guessing.engine.drop(leaves)
        guessing.engine.drop(third)
        guessing.engine.step()
        guessing.generate([last], ByteTokenizer())
        expected = generation([*head, *rest[2]], 8, ignore_eos=True)
        alone.generate([expected], ByteTokenizer())
        assert last.token_ids == expected.token_ids


def test_what_prompt_lookup_would_get_wrong_is_refused(converted: Path, tmp_path: Path) -> None:
    made = made_of(converted, tmp_path, prompt_lookup=5)
    with pytest.raises(RequestError, match="min_tokens"):
        made.engine.admit(generation([40], 8, min_tokens=4))
    assert not made.engine.busy


def test_a_pipeline_that_fails_is_made_anew(converted: Path, tmp_path: Path) -> None:
    from llmserve_openvino.engine import Engine

    made = made_of(converted, tmp_path)
    before, lost, after = generation(), generation(), generation()
    made.generate([before], ByteTokenizer())

    pipelines = iter([Poisoned(made.engine.pipeline), made.engine.pipeline])
    engine = Engine(lambda: next(pipelines), vocab_size=1024)
    engine.admit(lost)
    with pytest.raises(RuntimeError, match="Check failed"):
        engine.step()
    assert not engine.busy
    engine.admit(after)
    while engine.busy:
        engine.step()
    assert after.token_ids == before.token_ids
    assert len(after.token_ids) == 8
