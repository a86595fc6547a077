"""Answers without a text, in which there is nothing to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.examine import Ask, Examination, Reply
from llmserve_certify.run import run_check

from .scripted import Scripted
from .toy_server import END, ToyModel

SPECIAL = 2


class Always(ToyModel):
    """Writes the same token at every place."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
        scores = super().scores(ids, shift)
        scores[self.token] = 1000.0
        return scores


class Silent(Scripted):
    chats = True

    def __init__(self, count: int | None = None) -> None:
        super().__init__(lambda prompt, asked: "")
        self.count = count

    def ask(self, ask: Ask) -> Reply:
        return Reply("", "length" if ask.messages else None, self.count)


def state(name: str, endpoint: Silent, model: ToyModel) -> tuple[str, str]:
    check = next(check for check in CHECKS if check.name == name)
    found = run_check(Examination(endpoint, model), check)
    return found.state, found.words or "".join(found.notes)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(ToyModel(), "failed"), (Always(END), "passed"), (Always(SPECIAL), "passed")],
)
def test_an_empty_answer_is_only_that_of_a_model_that_writes_nothing(
    model: ToyModel, expected: str
) -> None:
    found, words = state("greedy-is-the-models", Silent(), model)
    assert found == expected
    assert words == ("the answer is empty" if expected == "failed" else "")


@pytest.mark.parametrize(
    ("count", "expected", "words"),
    [
        (None, "undecided", "has no text that could be compared"),
        (0, "failed", "has 0 tokens there and"),
    ],
)
def test_a_chat_whose_answer_is_all_in_another_field_proves_nothing(
    count: int | None, expected: str, words: str
) -> None:
    found, said = state("chat-template", Silent(count), ToyModel())
    assert found == expected
    assert words in said


def test_of_a_chat_without_text_the_count_is_compared() -> None:
    class Counting(Silent):
        def ask(self, ask: Ask) -> Reply:
            model = ToyModel()
            ids = model.encode(model.render(ask.messages), special=False)
            return Reply("", "length", len(ids))

    found, said = state("chat-template", Counting(), ToyModel())
    assert found == "passed"
    assert "only the count of its tokens is compared" in said
