"""Where two answers part, and whether rounding explains it."""

from __future__ import annotations

import pytest

from llmserve.client import EXPLAINED, Logprob, Parting


def likeliest(**logprobs: float) -> Logprob:
    """Return the first token, with all of them as the likeliest."""
    top = tuple(Logprob(at, token, value) for at, (token, value) in enumerate(logprobs.items()))
    first, value = next(iter(logprobs.items()))
    return Logprob(0, first, value, top)


def test_equal_answers_part_nowhere() -> None:
    one = [likeliest(a=-0.1, b=-2.0)]
    assert Parting.find(one, one) is None
    assert Parting.find(one, []) is None


@pytest.mark.parametrize(
    ("one", "other", "precision", "verdict"),
    [
        (likeliest(a=-0.7, b=-0.9), likeliest(b=-0.75, a=-0.9), "bfloat16", "tie"),
        (likeliest(a=-0.7, b=-0.9), likeliest(b=-0.75, a=-0.9), "float32", "differs"),
        (likeliest(a=-0.1, b=-2.0), likeliest(b=-0.1, a=-2.0), "int8", "differs"),
        # The other's token is not even among the likeliest.
        (likeliest(a=-0.7, c=-0.8), likeliest(b=-0.7, a=-0.8), "bfloat16", "differs"),
        (likeliest(a=-0.7, b=-0.9), Logprob(1, "b", -0.7), "bfloat16", "unexplained"),
    ],
)
def test_a_tie_is_what_a_precision_explains(
    one: Logprob, other: Logprob, precision: str, verdict: str
) -> None:
    same = likeliest(x=-0.5, y=-1.0)
    parting = Parting.find([same, one], [same, other])
    assert parting is not None
    assert parting.at == 1
    assert parting.verdict(EXPLAINED[precision]) == verdict
