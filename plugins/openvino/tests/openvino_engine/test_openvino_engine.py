"""The engine in process: guessing, and a failed step that must not break the next one."""

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


class BrokenPipeline:
    """A pipeline in which every step fails, as a request can leave it."""

    def __init__(self, pipeline: Any) -> None:
        self.add_request = pipeline.add_request

    def step(self) -> None:
        raise RuntimeError("Check failed")


def generation(prompt: Sequence[int] = (40, 50, 60), length: int = 8, **params: Any) -> Generation:
    end = frozenset({0})
    return support.generation(prompt, length, eos=end, decode=lambda ids: "x" * len(ids), **params)


def make_generator(converted: Path, output: Path, **options: Any) -> Any:
    from llmserve_openvino.engine import OpenVinoGenerator

    built = llmserve.build("openvino", str(converted), output=output, **options)
    settings = built.manifest.components["generator"]["settings"]
    return OpenVinoGenerator(settings, built.folder / "1")


@pytest.mark.parametrize(
    "params",
    [{}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "seed": 7}, {"presence_penalty": 1.5}],
    ids=str,
)
def test_prompt_lookup_gives_the_same_tokens_in_fewer_steps(
    converted: Path, tmp_path: Path, params: dict[str, Any]
) -> None:
    # The last prompt contains its own answer.
    first = generation([40, 50, 60], 60, ignore_eos=True)
    plain = make_generator(converted, tmp_path / "first", dtype="float32")
    plain.generate([first], ByteTokenizer())
    prompts = [[7, 8, 9] * 6, list(range(30, 60)), [40, 50, 60, *first.token_ids, 40, 50, 60]]
    answers, steps = [], []
    for lookup in (0, 5):
        options: dict[str, Any] = {"dtype": "float32", "prompt_lookup": lookup}
        engine = make_generator(converted, tmp_path / str(lookup), **options).engine
        requests = [generation(prompt, 60, ignore_eos=True, **params) for prompt in prompts]
        for request in requests:
            engine.admit(request)
        count = 0
        while engine.busy:
            assert not engine.step().failed
            count += sum(not request.done for request in requests)
        answers.append([request.token_ids for request in requests])
        steps.append(count)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0]


def test_a_draft_model_gives_the_same_tokens_in_fewer_steps(
    converted: Path, tmp_path: Path
) -> None:
    prompts = [[7, 8, 9] * 6, list(range(30, 60)), [40, 50, 60]]
    # Together more than OpenVINO computes in a step by default, where it would lose count.
    prompts += [[(13 * i * i + row) % 1000 + 1 for i in range(110)] for row in range(8)]
    answers: list[list[list[int]]] = []
    steps: list[int] = []
    params: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.5}]
    for options in ({}, {"draft_model": str(converted), "draft_tokens": 3}):
        output = tmp_path / str(len(answers))
        engine = make_generator(converted, output, dtype="float32", **options).engine
        requests = [
            generation(prompt, 40, ignore_eos=True, **param)
            for prompt, param in zip(prompts, cycle(params))
        ]
        dropped = generation([1, 2, 3], 40, ignore_eos=True)
        for request in (*requests, dropped):
            engine.admit(request)
        count = 0
        while engine.busy:
            assert not engine.step().failed
            count += 1
            if count == 2:
                engine.drop(dropped)
        answers.append([request.token_ids for request in requests])
        steps.append(count)
    assert answers[0] == answers[1]
    assert steps[1] * 2 < steps[0]
    for refused in ({"temperature": 0.8}, {"min_tokens": 4}):
        with pytest.raises(RequestError, match="it has a draft model"):
            engine.admit(generation([40], 8, **refused))


def test_guessing_reads_a_prompt_longer_than_a_step_whole(converted: Path, tmp_path: Path) -> None:
    """Two prompts are more than OpenVINO reads in a step, and with guesses it lost count of one."""
    guessing = make_generator(converted, tmp_path / "guessing", dtype="float32", prompt_lookup=4)
    plain = make_generator(converted, tmp_path / "plain", dtype="float32")
    for seed in range(8):
        rng = random.Random(seed)
        head, first, *rest = (
            [rng.randrange(1, 1000) for _ in range(n)] for n in (260, 32, 1, 1, 90)
        )
        second = generation([*head, *rest[0]], 2, ignore_eos=True)
        third = generation([*head, *rest[1]], 30, ignore_eos=True, presence_penalty=1.0)
        last = generation([*head, *rest[2]], 8, ignore_eos=True)
        dropped = generation(first, 7, ignore_eos=True, repetition_penalty=1.3)
        for request in (dropped, second, third):
            guessing.engine.admit(request)
        for _ in range(2):
            guessing.engine.step()
        guessing.engine.drop(dropped)
        guessing.engine.drop(third)
        guessing.engine.step()
        guessing.generate([last], ByteTokenizer())
        expected = generation([*head, *rest[2]], 8, ignore_eos=True)
        plain.generate([expected], ByteTokenizer())
        assert last.token_ids == expected.token_ids


def test_prompt_lookup_refuses_parameters_it_does_not_support(
    converted: Path, tmp_path: Path
) -> None:
    engine = make_generator(converted, tmp_path, prompt_lookup=5).engine
    with pytest.raises(RequestError, match="min_tokens"):
        engine.admit(generation([40], 8, min_tokens=4))
    assert not engine.busy


def test_a_pipeline_that_fails_is_replaced(converted: Path, tmp_path: Path) -> None:
    from llmserve_openvino.engine import Engine

    generator = make_generator(converted, tmp_path)
    before, lost, after = generation(), generation(), generation()
    generator.generate([before], ByteTokenizer())

    pipeline = generator.engine.pipeline
    pipelines = iter([BrokenPipeline(pipeline), pipeline])
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
