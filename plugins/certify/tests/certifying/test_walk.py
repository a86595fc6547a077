"""How a model is led along an answer whose characters are made of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmserve_certify.reference import walk

from .toy_server import SIZE, ToyModel

SMILE = "🙂"


class Undecided(ToyModel):
    """Prefers the first byte of a smile to a word by very little."""

    def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
        scores = np.full(SIZE, -20.0, np.float32)
        smile = self.encode(SMILE, special=False)
        for number, token in enumerate(smile):
            scores[token] = 10.0 if number == len(set(ids) & set(smile)) else -10.0
        scores[self.encode(" the", special=False)[0]] = 9.999
        return scores


@pytest.mark.parametrize("text", [" the", f"{SMILE} the", f" the{SMILE} the"])
def test_a_part_of_a_character_leads_no_answer_astray(text: str) -> None:
    model = Undecided()
    found = walk(model, model.encode("Hello"), text)
    assert found.is_complete
    assert list(found.ids) == model.encode(text, special=False)
    assert all(fork.gap == pytest.approx(0.001, abs=1e-4) for fork in found.forks)


def test_an_answer_that_is_cut_in_a_character_is_explained() -> None:
    model = Undecided()
    found = walk(model, model.encode("Hello"), " the\ufffd")
    assert found.is_complete
    assert len(found.forks) == 1


@pytest.mark.parametrize("text", ["\ud83d", " the\ud83d of"])
def test_half_of_a_surrogate_pair_is_no_text_of_the_model(text: str) -> None:
    """JSON can have it, and nothing can encode it."""
    model = ToyModel()
    found = walk(model, model.encode("Hello"), text)
    assert found.worst
    assert found.worst.gap > 1
