"""Whether the answers to typed questions are probabilities, and those of their own questions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from llmserve.plugin import Check
from llmserve_certify.endpoint import Decision, Gone, Refusal
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered

_STATE = (
    "The parcel came four days late. The customer wants the money back, and writes in capitals."
)
_QUESTIONS: Mapping[str, Any] = {
    "team": {
        "type": "choice",
        "instructions": "Which team should answer?",
        "criteria": {"billing": "payments and refunds", "delivery": None, "sales": None},
    },
    "late": {"type": "noul", "instructions": "Did the parcel come late?"},
    "urgency": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["it can wait", "this week", "today", "at once"],
    },
}
_OPTIONS = {"team": {"billing", "delivery", "sales"}, "late": set(), "urgency": {*"0123"}}
_TOLERANCE = 1e-3
# Questions that are computed in other batches are rounded otherwise; answers to another question
# differ by more.
_BESIDE = 0.05


def _add_up(exam: Examination) -> None:
    names = list(_QUESTIONS)
    together = _ask(exam, names)
    worst = 0.0
    for order in (names[::-1], *([name] for name in names)):
        for name, found in _ask(exam, order).items():
            before, now = _numbers(together[name]), _numbers(found)
            apart = max(abs(before.get(each, 0.0) - share) for each, share in now.items())
            worst = max(worst, apart)
            # So that a difference that is no number is none that is allowed.
            if not apart <= _BESIDE:
                where = "alone" if len(order) == 1 else "in another order"
                words = f"asked {where}, {name!r} has another answer by {apart:.3g}"
                raise _broken(exam, order, words, found, before)
    exam.figures |= {"questions": len(names), "largest difference": round(worst, 6)}


def _ask(exam: Examination, names: list[str]) -> dict[str, Decision]:
    questions = {name: _QUESTIONS[name] for name in names}
    exam.count()
    try:
        found = exam.in_time(partial(exam.endpoint.decide, _STATE, questions))
    except Refusal as error:
        if error.is_orderly and error.status != 429:
            raise NotOffered(f"it answers no typed questions: {error.words}") from None
        words = f"valid questions are an error of the server: {error.words}"
        raise _broken(exam, names, words, error.words) from None
    except Gone as error:
        raise _broken(exam, names, error.problem, error.got) from None
    if found.keys() != questions.keys():
        raise _broken(exam, names, "not all questions are answered", [*found], names)
    for name, decision in found.items():
        if wrong := _wrong(name, decision):
            raise _broken(exam, names, f"the answer to {name!r} {wrong}", decision)
    return found


def _wrong(name: str, found: Decision) -> str:
    """Return what of an answer cannot be, if anything."""
    if found.kind != _QUESTIONS[name]["type"]:
        return "is of another type"
    shares, said = found.shares, found.said
    if found.kind == "noul" and isinstance(said, str):
        return "is a text and no probability"
    if not all(0 <= share <= 1 for share in (*shares.values(), *_numbers(found).values())):
        return "has a probability that is none"
    if shares and not math.isclose(sum(shares.values()), 1, abs_tol=_TOLERANCE):
        return f"has probabilities of {sum(shares.values()):.5g} together"
    if found.kind == "noul":
        yes = shares.get("yes", said)
        return "" if _is_near(yes, said) else "is not the probability of yes"
    if shares.keys() != _OPTIONS[name]:
        return "has not the probabilities of its options"
    if found.kind == "choice":
        is_best = said in shares and shares[str(said)] == max(shares.values())
        return "" if is_best else "is not its likeliest option"
    mean = sum(int(level) * share for level, share in shares.items())
    return "" if _is_near(mean, said) else "is not the mean of its levels"


def _is_near(one: Any, other: Any) -> bool:
    return isinstance(other, (int, float)) and abs(one - other) <= _TOLERANCE


def _numbers(found: Decision) -> Mapping[str, float]:
    return {"yes": float(found.said)} if found.kind == "noul" else found.shares


def _broken(
    exam: Examination, names: list[str], words: str, got: Any, expected: Any = None
) -> Broken:
    questions = {name: _QUESTIONS[name] for name in names}
    curl = exam.endpoint.decide_curl(_STATE, questions)
    return Broken(words, expected=expected, got=got).with_curl(curl)


CHECKS = (
    Check(
        name="decisions-add-up",
        severity="major",
        promise="the answers to typed questions are probabilities, whatever is asked beside them",
        meaning="thresholds that are set on them let the wrong cases through",
        run=_add_up,
    ),
)
