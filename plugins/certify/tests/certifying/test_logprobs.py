"""What is proof that log-probabilities are not the model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmserve.client import Logprob
from llmserve_certify.checks import CHECKS
from llmserve_certify.examine import Ask, Broken, Examination, Reply
from llmserve_certify.reference import Noise, greedy, walk

from .scripted import Scripted
from .toy_server import ToyModel


class Exact(Scripted):
    """Answers as the model does, but for the first log-probability or its likeliest tokens."""

    def __init__(
        self, first: float | None = None, tops: tuple[float, ...] = (), apart: float = 0.0
    ) -> None:
        super().__init__(lambda prompt, asked: "")
        self.first, self.tops, self.apart = first, tops, apart

    def ask(self, ask: Ask) -> Reply:
        model = ToyModel()
        ids = model.encode(ask.prompt)
        answer, _ = greedy(model, ids, ask.options["max_tokens"])
        text = model.decode(ids, answer)
        values = walk(model, ids, text).logprobs
        found = [Logprob(-1, "x", value - self.apart) for value in values]
        if found and self.first is not None:
            found[0] = replace(found[0], logprob=self.first)
        if found and self.tops:
            found[0] = replace(found[0], top=tuple(Logprob(-1, "x", top) for top in self.tops))
        return Reply(text, logprobs=tuple(found))


class Rounded(ToyModel):
    """Rounding changes its log-probabilities by at most a tenth."""

    def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
        return Noise(0.0, 0.1, 10)


def run(endpoint: Exact, model: ToyModel | None = None) -> None:
    exam = Examination(endpoint, model or ToyModel(), "float32")
    next(check for check in CHECKS if check.name == "log-probabilities").run(exam)


@pytest.mark.parametrize("first", [math.nan, -math.inf, 0.5])
def test_a_log_probability_that_is_no_number_is_not_the_models(first: float) -> None:
    with pytest.raises(Broken, match="the log-probability of token 1"):
        run(Exact(first))


@pytest.mark.parametrize("tops", [(math.nan,), (-1.0, math.nan), (-2.0, -1.0)])
def test_the_likeliest_tokens_have_an_order(tops: tuple[float, ...]) -> None:
    with pytest.raises(Broken, match="not in order"):
        run(Exact(tops=tops))


@pytest.mark.parametrize("tops", [(), (-1.0, -math.inf)])
def test_the_models_own_are_right(tops: tuple[float, ...]) -> None:
    run(Exact(tops=tops))


@pytest.mark.parametrize(("apart", "is_right"), [(0.25, True), (0.39, True), (0.5, False)])
def test_a_few_times_what_rounding_changes_is_no_proof(apart: float, is_right: bool) -> None:
    if is_right:
        run(Exact(apart=apart), Rounded())
    else:
        with pytest.raises(Broken, match=r"differs by 0\.5; float32 explains 0\.4"):
            run(Exact(apart=apart), Rounded())


@pytest.mark.parametrize("found", [None, ()])
def test_none_at_all_are_no_log_probabilities(found: tuple[Logprob, ...] | None) -> None:
    class Without(Exact):
        def ask(self, ask: Ask) -> Reply:
            return replace(super().ask(ask), logprobs=found)

    with pytest.raises(Broken, match="accepted and has no effect"):
        run(Without())
