"""What a model's answers lose against those of another way to serve it, such as with fewer bits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import exp
from statistics import fmean

from llmserve.client import Client, Completion, connect
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
    for target in targets:
        on_step(f"reading the answers of {target.subject.name}")
        try:
            with connect(target.url) as client:
                answers = [_answer(client, target.model, prompt) for prompt in prompts]
                expected = expected or answers
                texts = [p + answer.text for p, answer in zip(prompts, expected, strict=True)]
                odds = [odd for text in texts for odd in _odds(client, target.model, text)]
        except LLMServeError as error:
            problems.append(f"the answers of {target.subject.name} are not compared: {error}")
            if not expected:
                break
            continue
        found.append(_loss(target, expected, answers, odds))
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


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text.strip().partition("\n")[0]), Mapping | list)
    except ValueError:
        return False
