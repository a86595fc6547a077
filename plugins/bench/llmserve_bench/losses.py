"""What a model's answers lose against those of another way to serve it, such as with fewer bits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from math import exp
from statistics import fmean
from typing import Any

from llmserve.client import Client, Completion, ToolCall, connect
from llmserve.errors import IncompatibleError, LLMServeError
from llmserve_bench.results import Loss
from llmserve_bench.targets import OnStep, Target

PROMPTS = (
    "The water of a lake freezes from the top down, because",
    "Question: What is the capital of Peru?\nAnswer:",
    'def is_prime(number: int) -> bool:\n    """Return whether a number is prime."""\n',
    "A short letter to a neighbour whose dog barks at night:\n\nDear neighbour,",
    "Translate to French: The train leaves at nine in the morning.\nFrench:",
    "In three sentences, the story of a lighthouse keeper who finds a bottle on the beach.\n",
    "Ana has 12 apples. She gives 5 to Ben and buys 8 more. Now she has",
    "The five largest planets of the solar system, the largest first:\n1.",
    'A person as JSON, with name, age and city:\n{"name": "Maria", "age": 34, "city": "Lisbon"}\n'
    "Another one, on one line:\n",
    "Summary: The council voted on Tuesday to close the old bridge to cars. Buses and bicycles may "
    "still cross it. The vote was nine to four.\nIn one sentence:",
    "SELECT name, COUNT(*) FROM orders",
    "To make bread one needs flour, water, salt and yeast. First,",
)
"""What is asked if no prompts are given."""
_TOKENS = 48
_CALL_TOKENS = 96


def _tool(name: str, does: str, /, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
    }
    function = {"name": name, "description": does, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get_weather", "Tells the weather of a city.", city="string"),
    _tool("convert_money", "Converts money.", amount="number", currency="string"),
    _tool("set_alarm", "Sets an alarm at an hour of the day.", hour="number", name="string"),
)
QUESTIONS = (
    "What is the weather in Oslo?",
    "How much are 20 euros in yen?",
    "Wake me at 7 for the flight.",
    "Is it raining in Lima?",
    "Convert 150 dollars to Swiss francs.",
    "Set an alarm called bread at 16.",
)
"""What a model that calls tools answers with a call."""
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {"string": (str,), "number": (int, float)}


def losses(
    targets: Sequence[Target], prompts: Sequence[str], on_step: OnStep
) -> tuple[tuple[Loss, ...], list[str]]:
    """Compare each model's answers with the first's; also return what could not be compared.

    All are asked for the likeliest tokens. How likely the first's answers are to another model,
    with the prompts before them, is its perplexity.
    """
    found: list[Loss] = []
    problems: list[str] = []
    expected: list[Completion] = []
    called: list[bool] | None = None
    for target in targets:
        on_step(f"reading the answers of {target.subject.name}")
        try:
            with connect(target.url) as client:
                answers = [_answer(client, target.model, prompt) for prompt in prompts]
                calls = _calls(client, target.model)
                called = called if expected else calls
                expected = expected or answers
                texts = [p + answer.text for p, answer in zip(prompts, expected, strict=True)]
                odds = [odd for text in texts for odd in _odds(client, target.model, text)]
        except LLMServeError as error:
            problems.append(f"the answers of {target.subject.name} are not compared: {error}")
            if not expected:
                break
            continue
        loss = _loss(target, expected, answers, odds)
        found.append(replace(loss, tool_calls=_kept(called, calls)))
    return tuple(found), problems


def _answer(client: Client, model: str, prompt: str) -> Completion:
    return client.generate(model, prompt, max_tokens=_TOKENS, temperature=0, logprobs=0)


def _odds(client: Client, model: str, text: str) -> list[float]:
    """Return the log-probability of each token of a text but the first."""
    answer = client.generate(model, text, max_tokens=1, prompt_logprobs=0)
    if (found := answer.extra.get("prompt_logprobs")) is None:
        raise IncompatibleError("it returns no log-probabilities of a prompt")
    entries = json.loads(found)
    return [entry["logprob"] for entry in entries if entry.get("logprob") is not None]


def _loss(
    target: Target, expected: Sequence[Completion], answers: Sequence[Completion], odds: list[float]
) -> Loss:
    pairs = [(_tokens(a), _tokens(b)) for a, b in zip(expected, answers, strict=True)]
    alike = [len([*takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))])
             for pair in pairs]  # fmt: skip
    total = sum(len(first) for first, _ in pairs)
    valid = [_is_json(b.text) for a, b in zip(expected, answers, strict=True) if _is_json(a.text)]
    return Loss(
        target.subject.name,
        perplexity=exp(-fmean(odds)) if odds else None,
        alike=sum(alike) / total if total else None,
        json=fmean(valid) if valid else None,
        memory=target.memory(),
    )


def _tokens(answer: Completion) -> list[str]:
    return [each.token for each in answer.logprobs or ()] or answer.text.split()


def _calls(client: Client, model: str) -> list[bool] | None:
    """Return which questions a model answers with a valid call; None if it takes no tools."""
    try:
        answers = [
            client.generate(
                model, messages=[{"role": "user", "content": question}], tools=[*TOOLS],
                max_tokens=_CALL_TOKENS, temperature=0,
            )
            for question in QUESTIONS
        ]  # fmt: skip
    except LLMServeError:
        return None
    return [
        bool(answer.tool_calls) and all(is_valid_call(call) for call in answer.tool_calls)
        for answer in answers
    ]


def _kept(expected: list[bool] | None, found: list[bool] | None) -> float | None:
    """Return how many of the first's valid calls are valid here as well; None if it makes none."""
    if not expected or found is None or not any(expected):
        return None
    return fmean(here for first, here in zip(expected, found, strict=True) if first)


def is_valid_call(call: ToolCall) -> bool:
    """Return whether a call is of one of ``TOOLS``, with all its arguments and in their types."""
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    if call.name not in known or not isinstance(arguments, Mapping):
        return False
    types = {key: value["type"] for key, value in known[call.name]["properties"].items()}
    return arguments.keys() == types.keys() and all(
        isinstance(arguments[key], _JSON_TYPES[kind]) and not isinstance(arguments[key], bool)
        for key, kind in types.items()
    )


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text.strip().partition("\n")[0]), Mapping | list)
    except ValueError:
        return False
