"""Typed decisions: what a model is asked, what its scores become, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion, Logprob, ModelInfo
from llmserve.errors import RequestRejectedError
from llmserve_gateway.decisions import DECISION, read_decision, shares_of
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key

from .gateways import NO_TRITON, Triton, request_via

PATH = "/v1/systemone"
STATE = "The parcel is late, and the customer writes in capitals."
QUESTIONS: dict[str, Any] = {
    "team": {
        "type": "choice",
        "instructions": "Who answers this?",
        "criteria": {"billing": "money", "delivery": None, "sales": None},
    },
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
    "urgent": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["no", "so", "very"],
    },
}
SCORES = {"A": 0.1, "B": 0.6, "C": 0.1, "yes": 0.5, "no": 0.25, "0": 0.1, "1": 0.2, "2": 0.5}
"""How likely the model finds each label."""
IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Decider(Triton):
    """A model that finds each label as likely as it is told, and that tells no others."""

    tells, maker, is_old = True, "0.1", False

    def __init__(self, scores: Mapping[str, float] = SCORES) -> None:
        super().__init__()
        self.scores = scores

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        more: Any = {"logprobs": None} if self.tells else {}
        return replace(info, made_by_llmserve=self.maker, inputs={**info.inputs, **more})

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            return Completion(json.dumps({"ids": [], "text": "", "context_length": 512}), "stop")
        self.requests.append(options)
        labels = [] if self.is_old else options["logprobs_of"]
        top = [Logprob(ord(each[0]), each, math.log(self.scores[each])) for each in labels]
        first = replace(max(top, key=lambda one: one.logprob), top=tuple(top)) if top else None
        told = (first or Logprob(1, "x", -0.5),)
        return Completion("x", "length", 20, 1, {"num_cached_tokens": 8}, logprobs=told)


def decide(model: Any, body: Mapping[str, Any] | None = None, **more: Any) -> Any:
    asked = {"model": "m", "state": STATE, "questions": QUESTIONS, **(body or {})}
    return request_via(model, PATH, json=asked, **more)


def of(**question: Any) -> dict[str, Any]:
    return {"questions": {"q": question}}


class Slow(Decider):
    """Takes a while for each question."""

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        answer = await super().generate(name, prompt, **options)
        await asyncio.sleep(0.05)
        return answer


def test_the_questions_after_the_first_have_the_time_that_it_left() -> None:
    model = Slow()
    assert decide(model, settings=Settings(NO_TRITON, request_timeout=20.0)).status_code == 200
    first, *others = [asked["timeout"] for asked in model.requests]
    assert first <= 20
    assert len(others) == 2
    assert max(others) <= first - 0.05


def test_each_answer_has_its_share_of_the_scores() -> None:
    answer = decide(Decider())
    assert answer.status_code == 200, answer.text
    said = answer.json()
    near = pytest.approx
    assert said == {
        "id": ANY,
        "object": "structured_decision",
        "created": ANY,
        "model": "m",
        "answers": {
            "team": {
                "type": "choice",
                "choice": "delivery",
                "probabilities": near({"billing": 0.125, "delivery": 0.75, "sales": 0.125}),
                "confidence": near(0.6),
            },
            "angry": {
                "type": "noul",
                "noul": near(2 / 3),
                "probabilities": near({"yes": 2 / 3, "no": 1 / 3}),
                "confidence": near(0.5),
            },
            "urgent": {
                "type": "score",
                "score": near(1.5),
                "legend": {"0": "no", "1": "so", "2": "very"},
                "probabilities": near({"0": 0.125, "1": 0.25, "2": 0.625}),
                "confidence": near(0.5),
            },
        },
        "usage": {
            "input_tokens": 60,
            "output_tokens": 3,
            "input_tokens_details": {"cached_tokens": 24},
        },
        "diagnostics": {
            "team": {"label_mass": near(0.8), "argmax_is_label": True},
            "angry": {"label_mass": near(0.75), "argmax_is_label": True},
            "urgent": {"label_mass": near(0.8), "argmax_is_label": True},
        },
    }


def test_all_questions_are_asked_of_the_same_beginning() -> None:
    model = Decider()
    decide(model, {"instructions": "Be fair."})
    assert [asked["logprobs_of"] for asked in model.requests] == [
        ["A", "B", "C"], ["yes", "no"], ["0", "1", "2"],
    ]  # fmt: skip
    asked = [asked["messages"] for asked in model.requests]
    assert all(system == {"role": "system", "content": "Be fair."} for system, _ in asked)
    texts = [user["content"] for _, user in asked]
    assert all(text.startswith(f"{STATE}\n\nQuestion: ") for text in texts)
    assert "A: billing - money\nB: delivery\nC: sales\n" in texts[0]
    assert "\nyes\nno\n" in texts[1]
    assert "\n0: no\n1: so\n2: very\n" in texts[2]
    alike = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}
    assert all(asked.items() >= alike.items() for asked in model.requests)


def test_a_state_may_be_any_json_and_a_model_need_not_be_named() -> None:
    model = Decider()
    answer = request_via(model, PATH, json={
        "state": {"subject": "Où?", "lines": [1, 2]},
        "questions": {"is": {"type": "noul", "criteria": {"true": "it is so", "false": None}}},
    })  # fmt: skip
    assert answer.json()["answers"]["is"]["noul"] == pytest.approx(2 / 3)
    (text,) = [asked["messages"][0]["content"] for asked in model.requests]
    assert text.startswith('{"subject": "Où?", "lines": [1, 2]}\n\nyes: it is so\nno\n')


def test_images_come_before_the_text_of_the_state() -> None:
    class Seeing(Decider):
        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            info = await super().model(name, refresh=refresh)
            return replace(info, inputs={**info.inputs, "messages": ANY, "image_url": ANY})

    model = Seeing()
    answer = decide(model, {"images": [IMAGE]})
    assert answer.status_code == 200, answer.text
    assert all(asked["image_url"] == [IMAGE] for asked in model.requests)
    image, said = model.requests[0]["messages"][0]["content"]
    assert (image, said["type"]) == ({"type": "image"}, "text")
    assert said["text"].startswith(STATE)
    request = read_decision({"state": STATE, "questions": QUESTIONS, "images": [IMAGE]})
    assert request.estimated_tokens > len(QUESTIONS) * request.image_tokens
    blind = decide(Decider(), {"images": [IMAGE]})
    assert (blind.status_code, blind.json()["error"]["code"]) == (400, "unsupported_parameter")


OPTIONS: dict[str, Any] = {"type": "choice", "criteria": {"a": None, "b": None}}
MANY = {f"option {number}": None for number in range(27)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"state": None}, "state must be there"),
        ({"questions": None}, "at least one question"),
        ({"questions": {}}, "at least one question"),
        ({"questions": [OPTIONS]}, "at least one question"),
        ({"questions": {f"{n}": {"type": "noul"} for n in range(65)}}, "at most 64"),
        ({"questions": {"": OPTIONS}}, "needs a name"),
        ({"questions": {"q": "Is it?"}}, "is an object"),
        (of(), "type must be one of choice, noul, score"),
        (of(type="text"), "type must be one of"),
        (of(type=["noul"]), "type must be one of"),
        (of(**OPTIONS, examples=[]), "'examples' is not one of"),
        (of(type="choice"), "criteria must be an object"),
        (of(type="choice", criteria={}), "criteria must be an object"),
        (of(type="choice", criteria=["a", "b"]), "criteria must be an object"),
        (of(type="choice", criteria=MANY), "at most 26 answers, not 27"),
        (of(type="score"), "list of at least two levels"),
        (of(type="score", criteria=["one"]), "list of at least two levels"),
        (of(type="score", criteria={"a": 1, "b": 2}), "list of at least two levels"),
        (of(type="score", criteria=[*"abcdefghijk"]), "at most 10 answers, not 11"),
        (of(type="score", criteria=["a", "a"]), "two of its answers are the same"),
        (of(type="noul", criteria={"maybe": "so"}), "true and false"),
        (of(type="noul", criteria=["yes", "no"]), "true and false"),
        (of(type="noul", instructions="\ud800"), "UTF-8"),
        ({"state": "\ud800"}, "UTF-8"),
        ({"images": "a.png"}, "images must be a list"),
        ({"images": ["a.png"]}, "an image that is not in the request"),
        ({"audio": [IMAGE]}, "hears or watches"),
        ({"videos": [IMAGE]}, "hears or watches"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "no thinking may precede it"),
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused(body: dict[str, Any], words: str) -> None:
    model = Decider()
    content = json.dumps({"model": "m", "state": STATE, "questions": QUESTIONS, **body})
    answer = request_via(model, PATH, content=content)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].partition("[")[0] in DECISION.fields
    assert model.requests == []


@pytest.mark.parametrize(
    "large",
    [
        {"state": "so " * 200_000},
        {"instructions": "so " * 200_000},
        {"chat_template_kwargs": {"documents": "so " * 200_000}},
    ],
    ids=lambda large: next(iter(large)),
)
def test_what_is_large_is_not_sent_for_each_of_many_questions(large: dict[str, Any]) -> None:
    many = {f"{number}": {"type": "noul"} for number in range(64)}
    answer = decide(Decider(), {**large, "questions": many})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("lack", [{"tells": False}, {"maker": None}, {"is_old": True}])
def test_a_model_without_such_scores_is_said_to_have_none(lack: dict[str, Any]) -> None:
    model = Decider()
    vars(model).update(lack)
    answer = decide(model)
    assert answer.status_code == 501, answer.text
    assert answer.json()["error"]["param"] == "model"
    assert "log-probabilities" in answer.json()["error"]["message"]


def test_labels_that_are_no_tokens_are_refused_by_the_models_words() -> None:
    class Fails(Decider):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            if options.get("prompt_only"):
                return await super().generate(name, prompt, **options)
            words = "logprobs_of: 'yes' is not a token of its own"
            raise RequestRejectedError(words, code="unsupported_option", param="logprobs_of")

    answer = decide(Fails())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "questions"
    assert "'yes'" in answer.json()["error"]["message"]


def test_a_key_is_asked_for_and_its_limit_counts_the_state_for_each_question(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "app", tokens_per_minute=1000)
    of_keys = Settings(NO_TRITON, keys=path)
    assert decide(Decider(), settings=of_keys).status_code == 401

    def taken(questions: Mapping[str, Any]) -> int:
        body = {"state": "word " * 100, "questions": questions}
        headers = {"authorization": f"Bearer {key}"}
        answer = decide(Decider(), body, settings=of_keys, headers=headers)
        return 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])

    alone = [taken({name: question}) for name, question in QUESTIONS.items()]
    assert min(alone) > 500 // 3
    assert taken(QUESTIONS) == pytest.approx(sum(alone), abs=6)


@given(st.permutations(list(QUESTIONS)))
@settings(max_examples=6, deadline=None)
def test_no_question_depends_on_the_order_of_the_others(order: Sequence[str]) -> None:
    def prompts(names: Sequence[str]) -> dict[str, Any]:
        asked = {name: QUESTIONS[name] for name in names}
        request = read_decision({"model": "m", "state": STATE, "questions": asked})
        return dict(zip(names, request.model_calls(), strict=True))

    assert prompts(order) == prompts(list(QUESTIONS))


@given(st.lists(st.floats(-9999, 0), min_size=1, max_size=26))
def test_shares_are_a_distribution_in_the_order_of_the_scores(logprobs: list[float]) -> None:
    shares, mass = shares_of(logprobs)
    assert sum(shares) == pytest.approx(1)
    assert 0 <= mass <= 1
    ranked = sorted(range(len(shares)), key=lambda index: logprobs[index])
    assert [shares[index] for index in ranked] == sorted(shares)
