"""What is proof that an option of sampling has its effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.endpoint import Ask, Reply
from llmserve_certify.examination import PROMPTS
from llmserve_certify.examine import Broken, Examination
from llmserve_certify.outcome import Undecided

from .scripted import Scripted
from .toy_server import ToyModel


def run(name: str, exam: Examination) -> None:
    next(check for check in CHECKS if check.name == name).run(exam)


def test_a_penalty_that_changes_nothing_proves_nothing() -> None:
    with pytest.raises(Undecided, match="changes none of 4 answers"):
        run("presence-penalty", Examination(Scripted(lambda prompt, asked: " yes")))


def test_a_penalty_that_changes_nothing_proves_nothing_beside_the_model() -> None:
    class Certain(ToyModel):
        """Ends every answer at once, whatever is asked."""

        def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
            scores = super().scores(ids, shift)
            scores[1] = 100.0
            return scores

    exam = Examination(Scripted(lambda prompt, asked: ""), Certain())
    with pytest.raises(Undecided, match="changes none of 4 answers"):
        run("presence-penalty", exam)


def test_a_penalty_is_tried_where_it_changes_something() -> None:
    class Repeating(ToyModel):
        """Repeats a word without end after one of the prompts, and ends the others at once."""

        def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
            scores = super().scores(ids, shift)
            repeats = ids[: len(prompt_ids)] == prompt_ids
            scores[self.encode(" the", special=False)[0] if repeats else 1] = 20.0
            return scores

    prompt_ids = ToyModel().encode(PROMPTS[7])

    def ignoring(prompt: str, asked: int) -> str:
        return " the" * 24 if prompt == PROMPTS[7] else ""

    with pytest.raises(Broken, match="accepted and ignored"):
        run("frequency-penalty", Examination(Scripted(ignoring), Repeating()))


@pytest.mark.parametrize(("precision", "outcome"), [("bfloat16", Broken), ("int4", Undecided)])
def test_rounded_weights_may_draw_from_another_distribution(
    precision: str, outcome: type[Exception]
) -> None:
    exam = Examination(Scripted(lambda prompt, asked: " the"), ToyModel(), precision)
    with pytest.raises(outcome, match="not drawn as the model says"):
        run("sampling-distribution", exam)


@pytest.mark.parametrize(("reference", "chance"), [(False, "0.05"), (True, "0.004")])
def test_it_is_told_how_likely_an_option_without_effect_goes_unseen(
    reference: bool, chance: str
) -> None:
    """Without the model the answers to one prompt may be other ones, so less is seen."""

    class Half(Scripted):
        def ask(self, ask: Ask) -> Reply:
            is_hot = ask.options.get("temperature") and "top_k" not in ask.options
            # Of two prompts, the answers at a high temperature are the likeliest ones.
            return Reply(" no" if is_hot and ask.prompt in PROMPTS[:2] else " yes")

    exam = Examination(Half(lambda prompt, asked: ""), ToyModel() if reference else None)
    run("top-k", exam)
    assert exam.notes == [
        "without it, 4 of 8 answers are the likeliest one; that it is ignored goes unseen with a "
        f"probability of {chance}"
    ]


@pytest.mark.parametrize("ties", [1, 2])
def test_a_tie_after_one_prompt_is_no_option_that_is_ignored(ties: int) -> None:
    """Each prompt is asked with twice, and rounding changes both answers alike."""

    class Tied(Scripted):
        def ask(self, ask: Ask) -> Reply:
            if not ask.options.get("temperature"):
                return Reply(" yes")
            if "top_k" not in ask.options:
                return Reply(" maybe")
            return Reply(" no" if ask.prompt in PROMPTS[:ties] else " yes")

    exam = Examination(Tied(lambda prompt, asked: ""))
    if ties == 1:
        run("top-k", exam)
    else:
        with pytest.raises(Broken, match="4 of 8 answers have others"):
            run("top-k", exam)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_seed_that_is_kept_may_draw_another_of_thousands_of_tokens(is_kept: bool) -> None:
    """Rounding moves the sums of all the tokens before one, and with them what a number draws."""

    class Flat(Scripted):
        def ask(self, ask: Ask) -> Reply:
            seed, prompt = ask.options.get("seed", 0), PROMPTS.index(ask.prompt)
            if ask.options["max_tokens"] > 1:
                return Reply(f" {seed}")
            # At first each is asked alone, then beside the others.
            is_alone = super().ask(Ask(f"{prompt} {seed}")).text == "1"
            scores = 2 * np.random.default_rng(prompt).standard_normal(8000)
            if not is_alone:
                scores += 0.1 * np.random.default_rng((prompt, seed)).standard_normal(8000)
            if top_k := ask.options.get("top_k"):
                scores[np.argsort(-scores)[top_k:]] = -np.inf
            sums = np.cumsum(np.exp(scores))
            number = np.random.default_rng(seed if is_alone or is_kept else 100 + seed).random()
            return Reply(str(np.searchsorted(sums, number * sums[-1])))

    exam = Examination(Flat(lambda prompt, asked: str(asked)), precision="bfloat16")
    if is_kept:
        run("seed", exam)
    else:
        with pytest.raises(Broken, match="first tokens differ with the same seed"):
            run("seed", exam)


@pytest.mark.parametrize(
    ("changed", "outcome"), [(0, None), (12, None), (20, Undecided), (27, Broken), (32, Broken)]
)
def test_how_many_first_tokens_say_that_a_seed_is_not_kept(
    changed: int, outcome: type[Exception] | None
) -> None:
    """All 32 depend on the seed; a sampler that makes much of small changes is no proof."""

    class Seeded(Scripted):
        asked = 0

        def ask(self, ask: Ask) -> Reply:
            text = f"{ask.prompt} {ask.options.get('seed')}"
            if ask.options.get("temperature") == 1.0 and ask.options["max_tokens"] == 1:
                self.asked += 1
                # The first 32 come alone.
                text += "!" if 32 < self.asked <= 32 + changed else ""
            return Reply(text, "length")

    exam = Examination(Seeded(lambda prompt, asked: ""), precision="bfloat16", concurrency=1)
    if outcome is None:
        run("seed", exam)
    else:
        with pytest.raises(outcome, match=f"{changed} of 32 first tokens differ"):
            run("seed", exam)
