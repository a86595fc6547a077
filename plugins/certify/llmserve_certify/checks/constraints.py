"""Whether an answer has the form that a request demands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any

from llmserve.plugin import Check
from llmserve_certify.endpoint import Refusal, Reply
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered

_SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "number": {"enum": [1, 2, 3]}},
    "required": ["sure", "number"],
    "additionalProperties": False,
}
_CHOICE = ["alpha", "omega"]
_MOST = 48
"""The tokens of an answer."""


def _constrained(exam: Examination) -> None:
    """Constrained answers in whatever way the server offers them."""
    offered = 0
    for name, value, fits in (
        ("json_schema", _SCHEMA, _fits_schema),
        ("choice", _CHOICE, lambda text: text.strip() in _CHOICE),
        ("regex", "[0-9]{3}-[a-f]{2}", lambda text: bool(re.fullmatch("[0-9]{3}-[a-f]{2}", text))),
    ):
        if not exam.takes(name):
            continue
        for prompt in exam.prompts[:2]:
            ask = exam.greedy(prompt, _MOST, **{name: value})
            try:
                answer = exam.try_ask(ask)
            except Refusal as error:
                exam.note(f"{name} is refused: {error.words[:80]}")
                break
            offered += 1
            if _is_met(exam, name, answer, fits):
                continue
            if not _is_met_in_a_chat(exam, name, value, prompt, fits):
                words = f"{name} is accepted, and the answer does not meet it"
                raise Broken(words, expected=value, got=answer.text, ask=ask)
            exam.note(f"{name} is accepted and ignored with a prompt, and holds in a chat")
            break
    if not offered:
        raise NotOffered("no kind of constraint is offered")


def _is_met(exam: Examination, name: str, answer: Reply, fits: Callable[[str], bool]) -> bool:
    if name == "json_schema" and answer.finish_reason == "length" and _begins(answer.text):
        # White space between the parts of JSON can fill any length.
        exam.note(f"with {name}, an answer does not end within {_MOST} tokens")
        return True
    return fits(answer.text)


def _begins(text: str) -> bool:
    """Whether a text is the beginning of one that the schema allows."""
    parts = [('"sure":true', '"sure":false'), [f'"number":{n}' for n in (1, 2, 3)]]
    pairs = [*product(*parts), *product(*reversed(parts))]
    return any(f"{{{one},{other}}}".startswith("".join(text.split())) for one, other in pairs)


def _is_met_in_a_chat(
    exam: Examination, name: str, value: Any, prompt: str, fits: Callable[[str], bool]
) -> bool:
    """Whether it holds where OpenAI's API has it: its prompts without a chat have none."""
    if not exam.endpoint.chats:
        return False
    message = {"role": "user", "content": prompt}
    try:
        answer = exam.try_ask(exam.chat(message, tokens=_MOST, **{name: value}))
    except Refusal:
        return False
    return _is_met(exam, name, answer, fits)


def _fits_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and value.keys() == {"sure", "number"}
        and isinstance(value["sure"], bool)
        and value["number"] in (1, 2, 3)
    )


CHECKS = (
    Check(
        name="constrained",
        severity="major",
        promise="a constrained answer meets its constraint",
        meaning="programs that read answers as data fail",
        run=_constrained,
        quick=False,
    ),
)
