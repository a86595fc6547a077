"""Typed decisions, ``/v1/systemone``: questions about a state, and how likely each answer is.

As vLLM has them in 0.32.0 and llama.cpp's server since b11361. The two agree on requests and on
what answers are; where they do not, this is vLLM's, whose numbers say how likely the model finds
the answers, and none of llama.cpp's, which are scaled as the makers of some models publish them.
"""

from __future__ import annotations

import json
import math
import string
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from llmserve.client import Completion, Logprob, ModelInfo, Piece
from llmserve.runtime.contract import LOGPROBS_OF, OPTIONS
from llmserve_gateway.conversations import read_messages
from llmserve_gateway.dialects import Models
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    STRING,
    Body,
    Field,
    Values,
    any_text,
    check_encodable,
    ignored,
    option,
    reads,
    refused,
    text,
)
from llmserve_gateway.generation_fields import PRIORITY, unaffected
from llmserve_gateway.openai_answers import dump
from llmserve_gateway.openai_requests import check_copies
from llmserve_gateway.reply import Reply, RequestRecord
from llmserve_gateway.text_dialect import TextDialect
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.usage import CACHED, Usage

_MAX_QUESTIONS = 64
_LETTERS, _DIGITS, _YES_NO = tuple(string.ascii_uppercase), tuple(string.digits), ("yes", "no")
_PARTS = ("type", "instructions", "criteria")
_TEMPLATE = OPTIONS["chat_template_kwargs"]
_SCORES = OPTIONS["logprobs"].name


# Questions


@dataclass(frozen=True)
class Answer:
    """An answer that a question allows: how the client calls it, and how the model is to."""

    name: str
    label: str
    about: str = ""


@dataclass(frozen=True)
class Question:
    """One question, with the answers that it allows in the order in which the model reads them."""

    id: str
    kind: str
    asked: str
    answers: tuple[Answer, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(answer.label for answer in self.answers)

    @property
    def text(self) -> str:
        """What the model reads after the state."""
        kind = _KINDS[self.kind]
        head = [f"Question: {self.asked}"] if self.asked else []
        return "\n".join([*head, *map(kind.line, self.answers), kind.demand])


@dataclass(frozen=True)
class _Kind:
    """A type of questions: which answers its criteria allow, and what is told of the shares."""

    labels: tuple[str, ...]
    demand: str
    read: Callable[[str, Any], Sequence[tuple[str, str]]]
    """Returns the names of the answers, and what is said about them."""
    line: Callable[[Answer], str]
    tell: Callable[[Question, Sequence[float]], dict[str, Any]]


def _read_choice(where: str, criteria: Any) -> list[tuple[str, str]]:
    if not isinstance(criteria, dict) or not criteria:
        raise _wrong(
            where, "criteria must be an object of the options, and what each means or null"
        )
    return [(name, _as_text(about)) for name, about in criteria.items()]


def _read_score(where: str, criteria: Any) -> list[tuple[str, str]]:
    if not isinstance(criteria, list) or len(criteria) < 2:
        raise _wrong(where, "criteria must be a list of at least two levels, the lowest first")
    return [(_as_text(level), "") for level in criteria]


def _read_noul(where: str, criteria: Any) -> list[tuple[str, str]]:
    given = {} if criteria is None else criteria
    if not isinstance(given, dict) or not given.keys() <= {"true", "false"}:
        raise _wrong(where, "criteria must be an object with true and false, or nothing")
    return [("yes", _as_text(given.get("true"))), ("no", _as_text(given.get("false")))]


def _named_line(answer: Answer) -> str:
    about = f" - {answer.about}" if answer.about else ""
    return f"{answer.label}: {answer.name}{about}"


def _yes_or_no_line(answer: Answer) -> str:
    return f"{answer.label}: {answer.about}" if answer.about else answer.label


def _tell_choice(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    named = {answer.name: share for answer, share in zip(question.answers, shares, strict=True)}
    return {"choice": max(named, key=lambda name: named[name]), "probabilities": named}


def _tell_score(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    return {
        "score": sum(level * share for level, share in enumerate(shares)),
        "legend": {answer.label: answer.name for answer in question.answers},
        "probabilities": dict(zip(question.labels, shares, strict=True)),
    }


def _tell_noul(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    return {"noul": shares[0], "probabilities": dict(zip(question.labels, shares, strict=True))}


_KINDS: Mapping[str, _Kind] = {
    "choice": _Kind(
        _LETTERS, "Reply with one of these letters, and nothing else.",
        _read_choice, _named_line, _tell_choice,
    ),
    "noul": _Kind(
        _YES_NO, "Reply with yes or no, and nothing else.",
        _read_noul, _yes_or_no_line, _tell_noul,
    ),
    "score": _Kind(
        _DIGITS, "Reply with the number of one of these levels, and nothing else.",
        _read_score, _named_line, _tell_score,
    ),
}  # fmt: skip


def _wrong(where: str, what: str) -> ApiError:
    return bad_request(f"{where}: {what}", "questions")


def _as_text(value: Any) -> str:
    """Return a value as the model reads it: a text as it is, nothing for null, others as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _questions(value: Any, name: str) -> tuple[Question, ...]:
    if not isinstance(value, dict) or not value:
        raise bad_request(f"{name} must be an object with at least one question", name)
    if len(value) > _MAX_QUESTIONS:
        raise bad_request(f"{name}: at most {_MAX_QUESTIONS} at once, not {len(value)}", name)
    return tuple(_question(each, asked) for each, asked in value.items())


def _question(id: str, value: Any) -> Question:
    where = f"question {id[:40]!r}"
    if not id or not isinstance(value, dict):
        raise _wrong(where, "each needs a name, and is an object")
    if unknown := sorted(value.keys() - {*_PARTS}):
        raise _wrong(where, f"{unknown[0][:40]!r} is not one of {', '.join(_PARTS)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _wrong(where, f"type must be one of {', '.join(_KINDS)}")
    labels = _KINDS[kind].labels
    read = _KINDS[kind].read(where, value.get("criteria"))
    if len(read) > len(labels):
        raise _wrong(where, f"a {kind} has at most {len(labels)} answers, not {len(read)}")
    if len({answer for answer, _ in read}) < len(read):
        raise _wrong(where, "two of its answers are the same")
    answers = (
        Answer(answer, label, about) for (answer, about), label in zip(read, labels, strict=False)
    )
    question = Question(id, kind, _as_text(value.get("instructions")), tuple(answers))
    check_encodable(f"{id}{question.text}", where, "questions")
    return question


# Requests


def _state(value: Any, name: str) -> str:
    if value is None:
        raise bad_request(f"{name} must be there: a text, or any other JSON but null", name)
    said = _as_text(value)
    check_encodable(said, name)
    return said


def _images(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(image, str) for image in value):
        raise bad_request(
            f"{name} must be a list of addresses, such as data:image/png;base64,…", name
        )
    return value


def _arguments(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if any((value or {}).get(name) for name in ("enable_thinking", "thinking")):
        what = "an answer is the first token after the prompt, so no thinking may precede it"
        raise bad_request(f"{_TEMPLATE.name}: {what}", _TEMPLATE.name)
    return value


_MODEL = text("model", "The name of a model, if there are several.")
_STATE: Field[str] = Field(
    "state", "What the questions are about: a text, or any other JSON.", _state,
    {"type": ["string", "number", "boolean", "array", "object"]}, required=True,
)  # fmt: skip
_QUESTIONS: Field[tuple[Question, ...]] = Field(
    "questions", "The questions by their names, under which their answers are returned.",
    _questions,
    {"type": "object", "minProperties": 1, "maxProperties": _MAX_QUESTIONS,
     "additionalProperties": {
         "type": "object", "required": ["type"], "additionalProperties": False,
         "properties": {
             "type": {"enum": [*_KINDS]},
             "instructions": {"description": "What is asked."},
             "criteria": {"description": "The options of a choice by name with what they mean or "
                          "null, the levels of a score in order, or what true and false mean."}}}},
    required=True,
)  # fmt: skip
_CONTEXT = any_text("instructions", "What the model reads before the state, as its system prompt.")
_IMAGES: Field[list[str]] = Field(
    "images", "Images that the state has, for a model that sees.", _images,
    {"type": "array", "items": STRING}, absent=(),
)  # fmt: skip
DECISION = Body(
    _STATE,
    _QUESTIONS,
    _CONTEXT,
    _IMAGES,
    _MODEL,
    option(_TEMPLATE, then=_arguments),
    PRIORITY,
    *refused("no model here hears or watches", "audio", "videos"),
    *ignored("request_id"),
    *unaffected(),
)  # fmt: skip


@dataclass(frozen=True)
class DecisionRequest(ParsedRequest):
    """Questions about one state, each of which is a prompt that begins with it."""

    state_text: str = ""
    questions: tuple[Question, ...] = ()

    begins_alike = True

    @cached_property
    def _prompt_bytes(self) -> int:
        content = [self.options["messages"][:-1], self.options.get(_TEMPLATE.name)]
        others = json.dumps(content, ensure_ascii=False)
        shared = len(others.encode(errors="replace")) + len(self.state_text.encode())
        return sum(shared + len(question.text.encode()) for question in self.questions)

    def model_calls(self) -> list[tuple[str, dict[str, Any]]]:
        return [("", self._asking(question)) for question in self.questions]

    def _asking(self, question: Question) -> dict[str, Any]:
        *others, last = self.options["messages"]
        said = f"{self.state_text}\n\n{question.text}"
        content = last["content"]
        if not isinstance(content, str):
            content = [*content[:-1], {**content[-1], "text": said}]
        else:
            content = said
        messages = [*others, {**last, "content": content}]
        return {**self.options, "messages": messages, LOGPROBS_OF: [*question.labels]}


@reads(DECISION)
def read_decision(values: Values) -> DecisionRequest:
    questions, images = values[_QUESTIONS], values[_IMAGES]
    shown = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    said = {"type": "text", "text": ""}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*shown, said]}]
    if values[_CONTEXT]:
        messages.insert(0, {"role": "system", "content": values[_CONTEXT]})
    conversation = read_messages(messages, _IMAGES.name)
    scored = {"max_tokens": 1, "temperature": 0.0, _SCORES: 0, LOGPROBS_OF: []}
    request = DecisionRequest(
        model=values[_MODEL] or "",
        options={**values.options, **conversation.options, **scored},
        prompts=[""] * len(questions),
        thinking=Thinking(enabled=False),
        unknown=values.unknown,
        priority=values[PRIORITY],
        sent={LOGPROBS_OF: _QUESTIONS.name, "messages": _STATE.name, "max_tokens": _STATE.name},
        state_text=values[_STATE],
        questions=questions,
    )
    check_copies(request, _QUESTIONS.name)
    return request


# Answers


class DecisionWriter:
    """Writes the answers; they are only known together, so that nothing is streamed."""

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        # What read_decision returns.
        self._request = cast("DecisionRequest", request)
        self._id = f"decision-{record.id}"
        self.usage = Usage(len(self._request.questions), 1)

    def whole(self, answers: Sequence[Completion]) -> bytes:
        told, diagnostics = {}, {}
        for index, (question, answer) in enumerate(
            zip(self._request.questions, answers, strict=True)
        ):
            cached = answer.extra.get(CACHED)
            self.usage.update(index, answer.input_tokens, answer.output_tokens, cached)
            scores = _scores(question, answer, self._request.model)
            shares, mass = shares_of([score.logprob for score in scores.top])
            told[question.id] = {
                "type": question.kind,
                **_KINDS[question.kind].tell(question, shares),
                "confidence": max(shares) * mass,
            }
            diagnostics[question.id] = {
                "label_mass": mass,
                "argmax_is_label": any(score.id == scores.id for score in scores.top),
            }
        head = {"id": self._id, "object": "structured_decision", "created": int(time.time())}
        rest = {"answers": told, "usage": self._usage(), "diagnostics": diagnostics}
        return dump({**head, "model": self._request.called, **rest})

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        cached = usage.cached_tokens
        details = {} if cached is None else {"input_tokens_details": {"cached_tokens": cached}}
        return {
            "input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens, **details
        }  # fmt: skip

    def opening(self, piece: Piece) -> bytes:
        del piece
        return b""

    def chunk(self, piece: Piece) -> bytes:
        del piece
        return b""

    def closing(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error.event()


def _scores(question: Question, answer: Completion, model: str) -> Logprob:
    """Return the first token of an answer, with the log-probabilities of the labels."""
    first = (answer.logprobs or (None,))[0]
    if first is None or len(first.top) != len(question.labels):
        raise _not_supported(f"{model!r} tells no log-probabilities of given answers")
    return first


def shares_of(logprobs: Sequence[float]) -> tuple[list[float], float]:
    """Return the shares of answers among each other, and their probability among all tokens."""
    likeliest = max(logprobs)
    weights = [math.exp(logprob - likeliest) for logprob in logprobs]
    total = sum(weights)
    mass = math.fsum(map(math.exp, logprobs))
    # They are rounded on their way.
    return [weight / total for weight in weights], min(mass, 1.0)


def _not_supported(what: str) -> ApiError:
    return ApiError(501, what, param="model", code="unsupported_parameter")


@dataclass(frozen=True, eq=False, kw_only=True)
class DecisionDialect(TextDialect):
    """Decisions, of models that tell log-probabilities."""

    async def begin(
        self,
        models: Models,
        info: ModelInfo,
        request: ParsedRequest,
        reply: Reply,
        timeout: float | None,
    ) -> tuple[Usage, Awaitable[None]]:
        if not info.made_by_llmserve or _SCORES not in info.inputs:
            raise _not_supported(
                f"{info.name!r} tells no log-probabilities, which decisions are of"
            )
        return await super().begin(models, info, request, reply, timeout)
