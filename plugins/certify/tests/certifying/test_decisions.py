"""What is proof that answers to typed questions are no probabilities of theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llmserve_certify.checks import CHECKS
from llmserve_certify.endpoint import Decision, Malformed, Refusal
from llmserve_certify.examine import Broken, Examination, NotOffered
from llmserve_certify.openai_answers import read_decisions

from .scripted import Scripted

RIGHT = {
    "team": Decision("choice", "delivery", {"billing": 0.2, "delivery": 0.7, "sales": 0.1}),
    "late": Decision("noul", 0.9, {"yes": 0.9, "no": 0.1}),
    "urgency": Decision("score", 1.7, {"0": 0.1, "1": 0.3, "2": 0.4, "3": 0.2}),
}
Answer = Callable[[list[str]], Mapping[str, Decision]]


class Decider(Scripted):
    def __init__(self, answer: Answer) -> None:
        super().__init__(lambda prompt, asked: "")
        self.decides = answer

    def decide(self, state: str, questions: Mapping[str, Any]) -> dict[str, Decision]:
        return {**self.decides(list(questions))}


def run(answer: Answer) -> Examination:
    exam = Examination(Decider(answer))
    next(check for check in CHECKS if check.name == "decisions-add-up").run(exam)
    return exam


def right(names: list[str]) -> dict[str, Decision]:
    return {name: RIGHT[name] for name in names}


def test_answers_that_add_up_pass() -> None:
    assert run(right).figures == {"questions": 3, "largest difference": 0.0}
    # llama.cpp's server tells only how likely a yes is.
    bare = {**RIGHT, "late": Decision("noul", 0.9, {})}
    assert run(lambda names: {name: bare[name] for name in names}).asked == 5


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("team", {"kind": "score"}, "another type"),
        ("team", {"shares": {"billing": 0.2, "delivery": 0.6, "sales": 0.1}}, "0.9 together"),
        ("team", {"shares": {"billing": -0.2, "delivery": 1.1, "sales": 0.1}}, "that is none"),
        ("team", {"shares": {"billing": 0.3, "delivery": 0.7}}, "not the probabilities of its"),
        ("team", {"said": "billing"}, "not its likeliest"),
        ("late", {"said": 0.1}, "not the probability of yes"),
        ("late", {"said": math.nan, "shares": {}}, "that is none"),
        ("late", {"said": "yes"}, "is a text"),
        ("urgency", {"said": 2.0}, "not the mean"),
        ("urgency", {"said": "2"}, "not the mean"),
    ],
)
def test_an_answer_that_cannot_be_is_a_fault(name: str, change: Any, words: str) -> None:
    wrong = {**RIGHT, name: RIGHT[name]._replace(**change)}
    with pytest.raises(Broken, match=words):
        run(lambda names: {each: wrong[each] for each in names})


def test_an_answer_that_depends_on_its_place_is_a_fault() -> None:
    other = RIGHT["late"]._replace(said=0.4, shares={"yes": 0.4, "no": 0.6})

    def reversed_(names: list[str]) -> dict[str, Decision]:
        found = right(names)
        return {**found, "late": other} if names[0] == "urgency" and names[1:] else found

    def alone(names: list[str]) -> dict[str, Decision]:
        return {"late": other} if names == ["late"] else right(names)

    for answer, words in ((reversed_, "asked in another order"), (alone, "asked alone")):
        with pytest.raises(Broken, match=words):
            run(answer)


def test_an_answer_that_cannot_be_is_a_fault_in_another_order_too() -> None:
    bare = RIGHT["team"]._replace(shares={})

    def alone(names: list[str]) -> dict[str, Decision]:
        return {"team": bare} if names == ["team"] else right(names)

    with pytest.raises(Broken, match="not the probabilities of its"):
        run(alone)


def test_a_question_without_an_answer_is_a_fault() -> None:
    with pytest.raises(Broken, match="not all questions"):
        run(lambda names: right(names[:1]))


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_server_without_the_endpoint_is_not_judged(status: int) -> None:
    def refuse(names: list[str]) -> dict[str, Decision]:
        raise Refusal(status, "no such thing")

    with pytest.raises(NotOffered, match="no such thing"):
        run(refuse)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_of_the_server_is_a_fault(status: int) -> None:
    def fail(names: list[str]) -> dict[str, Decision]:
        raise Refusal(status, "it broke")

    with pytest.raises(Broken, match="it broke"):
        run(fail)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"answers": []},
        {"answers": {"q": {"type": "noul"}}},
        {"answers": {"q": {"type": "noul", "noul": True}}},
        {"answers": {"q": {"type": "choice", "choice": "a", "probabilities": {"a": "all"}}}},
        {"answers": {"q": {"type": "choice", "choice": "a", "probabilities": [1]}}},
    ],
)
def test_what_is_no_answer_is_malformed(answer: Any) -> None:
    with pytest.raises(Malformed):
        read_decisions(json.dumps(answer).encode())
